// CANN keeps the executors of functions that allow it, for later calls that differ in the addresses
// of their tensors alone: such a call skips the first phase. The interface is the one that
// torch_npu's own operators use.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

struct aclOpExecutor;

namespace ascend_attn::aclnn {

// Two calls share an executor if the bytes of their keys are equal; their addresses may differ.
class ExecutorKey {
 public:
  template <typename T>
    requires std::is_trivially_copyable_v<T>
  void add(const T& value) {
    add(&value, sizeof(T));
  }
  void add(std::string_view text) {
    add(text.size());
    add(text.data(), text.size());
  }
  void add(const void* data, size_t size) {
    const auto* begin = static_cast<const uint8_t*>(data);
    bytes_.append(begin, begin + size);
  }
  void add_address(void* address) { addresses_.push_back(address); }

  c10::ArrayRef<uint8_t> bytes() const { return bytes_; }
  c10::ArrayRef<void*> addresses() const { return addresses_; }

 private:
  c10::SmallVector<uint8_t, 2048> bytes_;
  c10::SmallVector<void*, 32> addresses_;
};

// The thread of a first phase: the caller's, or at level 2 that of the task queue.
enum class CallThread { caller, queue };

// The cache as one call meets it, on the thread of its first phase. There is one interface for
// callers, which compares the hashes of keys, and one for the task queue's thread, which compares
// keys.
class ExecutorCache {
 public:
  explicit ExecutorCache(CallThread thread);
  ~ExecutorCache();
  ExecutorCache(const ExecutorCache&) = delete;
  ExecutorCache& operator=(const ExecutorCache&) = delete;

  // The empty key of a call whose executor CANN keeps; otherwise null, and CANN forgets the key
  // that an earlier operator of this thread has left. The key is the thread's: CANN has its address
  // until a first phase copies it, and forgets the address only with the next key.
  ExecutorKey* key_of(const std::string& function, bool reuses_executor) const;

  // The executor that CANN has kept under the key, for the caller to consume or destroy; or null,
  // and then CANN keeps the one that the first phase makes.
  aclOpExecutor* find(const ExecutorKey& key, uint64_t* workspace_size) const;

 private:
  CallThread thread_;
};

}  // namespace ascend_attn::aclnn
