// The executors that CANN keeps for later calls, as torch_npu asks for them. Here it keeps those of
// attention, while a test wants that, and none of the functions behind tensor methods.
#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include "opapi/core/opapi.h"

namespace cann_sim {
namespace {

std::atomic<bool> keeping{false};

// Executors that first phases have left for later calls with the same key. Addresses are no part of
// a key: every call lists those of its own tensors.
class ExecutorCache {
 public:
  // The key and addresses that the call of this thread has announced.
  struct Call {
    uint64_t key = 0;
    std::vector<void*> addresses;
  };
  static Call& call() {
    static thread_local Call instance;
    return instance;
  }

  static ExecutorCache& instance() {
    static auto* cache = new ExecutorCache;
    return *cache;
  }

  void clear() {
    const std::lock_guard lock(mutex_);
    executors_.clear();
  }

  void store(const aclOpExecutor& executor) {
    if (call().key != 0) {
      const std::lock_guard lock(mutex_);
      executors_.insert_or_assign(
          call().key, Entry{&executor.function, executor.values, executor.workspace_size});
    }
  }

  aclOpExecutor* find(uint64_t key) {
    const std::lock_guard lock(mutex_);
    const auto found = executors_.find(key);
    if (found == executors_.end()) {
      return nullptr;
    }
    auto values = found->second.values;
    const auto& addresses = call().addresses;
    size_t next = 0;
    const auto place = [&](TensorView& view) {
      view.data = next < addresses.size() ? addresses[next] : nullptr;
      ++next;
    };
    for (auto& value : values) {
      if (auto* view = std::get_if<TensorView>(&value)) {
        place(*view);
      } else if (auto* list = std::get_if<std::vector<TensorView>>(&value)) {
        std::ranges::for_each(*list, place);
      }
    }
    // Another number of tensors than the call had that left the executor: a caller's mistake.
    TORCH_CHECK(next == addresses.size(), "an executor of ", next, " tensors is given ",
                addresses.size(), " addresses");
    return new aclOpExecutor(*found->second.function, std::move(values),
                             found->second.workspace_size);
  }

 private:
  struct Entry {
    const Function* function;
    std::vector<Value> values;
    uint64_t workspace_size;
  };
  std::mutex mutex_;
  std::map<uint64_t, Entry> executors_;
};

uint64_t hash_of(const uint8_t* key, size_t size) {
  return size ? std::hash<std::string_view>()({reinterpret_cast<const char*>(key), size}) : 0;
}

aclOpExecutor* find_executor(const char* function, uint64_t key, uint64_t* workspace_size) {
  auto* executor = ExecutorCache::instance().find(key);
  log_step(c10::str(function, executor ? ": found, " : ": none, ",
                    ExecutorCache::call().addresses.size(), " addresses"));
  if (executor) {
    *workspace_size = executor->workspace_size;
  }
  return executor;
}

}  // namespace

void keep_executor(const aclOpExecutor& executor) { ExecutorCache::instance().store(executor); }

}  // namespace cann_sim

using namespace cann_sim;

extern "C" {

bool CanUsePTACache(const char* function) {
  return keeping && std::string_view(function).find("Attention") != std::string_view::npos;
}
void InitPTACacheThreadLocal() {
  log_step("InitPTACacheThreadLocal");
  ExecutorCache::call() = {};
}
void AddTensorAddrToCachedList(void* address) {
  ExecutorCache::call().addresses.push_back(address);
}
// Keys differ from caller to caller: the log says whether there is one.
void SetPTAHashKey(uint64_t hash) {
  log_step(hash ? "SetPTAHashKey 1" : "SetPTAHashKey 0");
  ExecutorCache::call().key = hash;
}
void SetPTACacheHashKey(const uint8_t* key, size_t size) {
  log_step(size ? "SetPTACacheHashKey 1" : "SetPTACacheHashKey 0");
  ExecutorCache::call().key = hash_of(key, size);
}
aclOpExecutor* PTAGetExecCache(uint64_t hash, uint64_t* workspace_size) {
  return find_executor("PTAGetExecCache", hash, workspace_size);
}
aclOpExecutor* PTAFindExecCache(const uint8_t* key, size_t size, uint64_t* workspace_size) {
  return find_executor("PTAFindExecCache", hash_of(key, size), workspace_size);
}
void UnInitPTACacheThreadLocal() {
  log_step("UnInitPTACacheThreadLocal");
  ExecutorCache::call() = {};
}

// On or off, whatever was kept is gone.
void cann_sim_set_keeping_executors(bool on) {
  ExecutorCache::instance().clear();
  keeping = on;
}

}  // extern "C"
