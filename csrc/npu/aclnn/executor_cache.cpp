#include "npu/aclnn/executor_cache.h"

#include <functional>

#include "npu/aclnn/library.h"

namespace ascend_attn::aclnn {
namespace {

// The functions of CANN behind the cache. A CANN may lack them.
struct Interface {
  bool (*usable)(const char*) = find_function<bool(const char*)>("CanUsePTACache");
  void (*enter)() = find_function<void()>("InitPTACacheThreadLocal");
  void (*leave)() = find_function<void()>("UnInitPTACacheThreadLocal");
  void (*add_address)(void*) = find_function<void(void*)>("AddTensorAddrToCachedList");
  void (*set_hash)(uint64_t) = find_function<void(uint64_t)>("SetPTAHashKey");
  void (*set_key)(const uint8_t*,
                  size_t) = find_function<void(const uint8_t*, size_t)>("SetPTACacheHashKey");
  aclOpExecutor* (*find_hash)(uint64_t, uint64_t*) =
      find_function<aclOpExecutor*(uint64_t, uint64_t*)>("PTAGetExecCache");
  aclOpExecutor* (*find_key)(const uint8_t*, size_t, uint64_t*) =
      find_function<aclOpExecutor*(const uint8_t*, size_t, uint64_t*)>("PTAFindExecCache");

  bool compares_keys() const { return set_key && find_key; }
  bool compares_hashes() const { return set_hash && find_hash; }
};

const Interface& cann() {
  static const Interface instance;
  return instance;
}

}  // namespace

ExecutorCache::ExecutorCache(bool on_queue_thread) : on_queue_thread_(on_queue_thread) {
  if (cann().enter) {
    cann().enter();
  }
}

ExecutorCache::~ExecutorCache() {
  if (cann().leave) {
    cann().leave();
  }
}

bool ExecutorCache::keeps(const std::string& function) const {
  const auto& f = cann();
  return f.enter && f.leave && f.add_address && f.usable && f.usable(function.c_str()) &&
         (on_queue_thread_ ? f.compares_keys() : f.compares_hashes());
}

aclOpExecutor* ExecutorCache::find(const ExecutorKey& key, uint64_t* workspace_size) const {
  for (auto* address : key.addresses()) {
    cann().add_address(address);
  }
  const auto bytes = key.bytes();
  if (on_queue_thread_) {
    cann().set_key(bytes.data(), bytes.size());
    return cann().find_key(bytes.data(), bytes.size(), workspace_size);
  }
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const uint64_t hash = std::hash<std::string_view>()(text);
  cann().set_hash(hash);
  return cann().find_hash(hash, workspace_size);
}

void ExecutorCache::keep_none() const {
  if (!cann().enter || !cann().set_hash) {
    return;
  }
  if (on_queue_thread_ && cann().set_key) {
    cann().set_key(nullptr, 0);
  } else {
    cann().set_hash(0);
  }
}

}  // namespace ascend_attn::aclnn
