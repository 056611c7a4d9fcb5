// The executors that CANN keeps for later calls, and the host memory that it makes them in, with
// the lifetimes that opbase gives them. Here CANN keeps the executors of attention, while a test
// wants that, and none of the functions behind tensor methods.
#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "opapi/core/opapi.h"

namespace cann_sim {
namespace {

std::atomic<bool> keeping{false};
std::atomic<int64_t> times_cleared{0};

// Addresses are no part of a key: every call lists those of its own tensors.
struct AnnouncedCall {
  uint64_t hash = 0;
  const uint8_t* key = nullptr;  // the caller's memory, which a first phase reads
  size_t key_size = 0;
  std::vector<void*> addresses;
};
thread_local AnnouncedCall announced;

thread_local HugeMemory* huge_memory = nullptr;

std::string key_of(const void* bytes, size_t size) {
  return {static_cast<const char*>(bytes), size};
}

// CANN keeps the executors of each thread apart.
std::map<std::string, std::shared_ptr<KeptExecutor>>& kept_executors() {
  thread_local std::map<std::string, std::shared_ptr<KeptExecutor>> kept;
  thread_local int64_t cleared = 0;
  if (const int64_t now = times_cleared; cleared != now) {
    kept.clear();
    cleared = now;
  }
  return kept;
}

// The executor is the caller's: its second phase consumes it, or aclDestroyAclOpExecutor.
aclOpExecutor* find_executor(const char* function, const std::string& key,
                             uint64_t* workspace_size) {
  const auto& kept = kept_executors();
  const auto found = kept.find(key);
  const bool usable = found != kept.end() && found->second->usable;
  log_step(c10::str(function, usable ? ": found, " : ": none, ", announced.addresses.size(),
                    " addresses"));
  if (!usable) {
    return nullptr;
  }
  Prepared prepared = *found->second;
  size_t next = 0;
  const auto place = [&](TensorView& view) {
    view.data = next < announced.addresses.size() ? announced.addresses[next] : nullptr;
    ++next;
  };
  for (auto& value : prepared.values) {
    if (auto* view = std::get_if<TensorView>(&value)) {
      place(*view);
    } else if (auto* list = std::get_if<std::vector<TensorView>>(&value)) {
      std::ranges::for_each(*list, place);
    }
  }
  // Another number of tensors than the call had that left the executor: a caller's mistake.
  TORCH_CHECK(next == announced.addresses.size(), "an executor of ", next, " tensors is given ",
              announced.addresses.size(), " addresses");
  *workspace_size = prepared.workspace_size = workspace_of(prepared.function);
  return new aclOpExecutor(std::move(prepared));
}

}  // namespace

void keep_executor(aclOpExecutor& executor) {
  const auto key = announced.key_size ? key_of(announced.key, announced.key_size)
                   : announced.hash   ? key_of(&announced.hash, sizeof(announced.hash))
                                      : std::string();
  if (!key.empty()) {
    auto& kept = kept_executors()[key];
    if (!kept) {
      executor.kept = kept = std::make_shared<KeptExecutor>(executor);
    }
  }
}

void end_executor(const aclOpExecutor& executor) { huge_memory = executor.memory; }

}  // namespace cann_sim

using namespace cann_sim;

aclOpExecutor::aclOpExecutor(Prepared prepared)
    : Prepared(std::move(prepared)), memory(huge_memory) {}

extern "C" {

int aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  end_executor(*executor);
  delete executor;
  return ACL_SUCCESS;
}

int InitHugeMemThreadLocal(void*, bool) {
  log_step("InitHugeMemThreadLocal");
  huge_memory = new HugeMemory;
  return ACL_SUCCESS;
}
void UnInitHugeMemThreadLocal(void*, bool) {
  log_step("UnInitHugeMemThreadLocal");
  huge_memory = nullptr;
}
void ReleaseHugeMem(void*, bool) {
  log_step("ReleaseHugeMem");
  delete std::exchange(huge_memory, nullptr);
}

bool CanUsePTACache(const char* function) {
  return keeping && std::string_view(function).find("Attention") != std::string_view::npos;
}
void InitPTACacheThreadLocal() {
  log_step("InitPTACacheThreadLocal");
  announced = {};
}
void AddTensorAddrToCachedList(void* address) { announced.addresses.push_back(address); }
// Keys differ from caller to caller: the log says whether there is one.
void SetPTAHashKey(uint64_t hash) {
  log_step(hash ? "SetPTAHashKey 1" : "SetPTAHashKey 0");
  announced.hash = hash;
}
void SetPTACacheHashKey(const uint8_t* key, size_t size) {
  log_step(size ? "SetPTACacheHashKey 1" : "SetPTACacheHashKey 0");
  announced.key = key;
  announced.key_size = size;
}
aclOpExecutor* PTAGetExecCache(uint64_t hash, uint64_t* workspace_size) {
  return find_executor("PTAGetExecCache", key_of(&hash, sizeof(hash)), workspace_size);
}
aclOpExecutor* PTAFindExecCache(const uint8_t* key, size_t size, uint64_t* workspace_size) {
  return find_executor("PTAFindExecCache", key_of(key, size), workspace_size);
}
void UnInitPTACacheThreadLocal() {
  log_step("UnInitPTACacheThreadLocal");
  announced = {};
}

// On or off, whatever was kept is gone.
void cann_sim_set_keeping_executors(bool on) {
  ++times_cleared;
  keeping = on;
}

}  // extern "C"
