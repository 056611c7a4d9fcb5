#include "npu/aclnn/executor_cache.h"

#include <functional>

#include "npu/aclnn/library.h"

namespace ascend_attn::aclnn {
namespace {

// The functions of CANN behind the cache.
struct Interface {
  bool (*keeps)(const char*) = find_function("CanUsePTACache");
  void (*enter)() = find_function("InitPTACacheThreadLocal");
  void (*leave)() = find_function("UnInitPTACacheThreadLocal");
  void (*add_address)(void*) = find_function("AddTensorAddrToCachedList");
  void (*set_hash)(uint64_t) = find_function("SetPTAHashKey");
  void (*set_key)(const uint8_t*, size_t) = find_function("SetPTACacheHashKey");
  aclOpExecutor* (*find_hash)(uint64_t, uint64_t*) = find_function("PTAGetExecCache");
  aclOpExecutor* (*find_key)(const uint8_t*, size_t, uint64_t*) = find_function("PTAFindExecCache");
  // A CANN may lack some, and then keeps no executors.
  bool complete =
      keeps && enter && leave && add_address && set_hash && set_key && find_hash && find_key;
};

const Interface& cann() {
  static const Interface instance;
  return instance;
}

}  // namespace

ExecutorCache::ExecutorCache(CallThread thread) : thread_(thread) {
  if (cann().complete) {
    cann().enter();
  }
}

ExecutorCache::~ExecutorCache() {
  if (cann().complete) {
    cann().leave();
  }
}

ExecutorKey* ExecutorCache::key_of(const std::string& function, bool reuses_executor) const {
  if (!cann().complete) {
    return nullptr;
  }
  if (reuses_executor && cann().keeps(function.c_str())) {
    thread_local ExecutorKey key;
    key = {};
    return &key;
  }
  thread_ == CallThread::queue ? cann().set_key(nullptr, 0) : cann().set_hash(0);
  return nullptr;
}

aclOpExecutor* ExecutorCache::find(const ExecutorKey& key, uint64_t* workspace_size) const {
  for (auto* address : key.addresses()) {
    cann().add_address(address);
  }
  const auto bytes = key.bytes();
  if (thread_ == CallThread::queue) {
    cann().set_key(bytes.data(), bytes.size());
    return cann().find_key(bytes.data(), bytes.size(), workspace_size);
  }
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const uint64_t hash = std::hash<std::string_view>()(text);
  cann().set_hash(hash);
  return cann().find_hash(hash, workspace_size);
}

}  // namespace ascend_attn::aclnn
