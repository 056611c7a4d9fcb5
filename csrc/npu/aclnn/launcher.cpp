#include "npu/aclnn/launcher.h"

#include <ATen/Context.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <op_plugin/utils/op_api_common_base.h>
#include <torch_npu/csrc/core/npu/NPUException.h>
#include <torch_npu/csrc/core/npu/NPUWorkspaceAllocator.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>

#include "npu/product.h"
#include "ops/error.h"

namespace ascend_attn::aclnn {
namespace {

// A function of CANN's operator library, or null: a customer's libcust_opapi.so comes before
// libopapi.so.
template <typename Signature>
Signature* find(const char* name) {
  return reinterpret_cast<Signature*>(GetOpApiFuncAddr(name));
}

// CANN's message for the latest error of this thread, on one line.
std::string recent_error() {
  const char* message = c10_npu::c10_npu_get_error_message();
  std::string text = message && *message ? message : "CANN gave no message";
  std::ranges::replace(text, '\n', ' ');
  return text;
}

void check_status(const Function& function, const char* phase, int status) {
  if (status != 0) [[unlikely]] {
    raise(Violation::runtime, function.op, function.name + phase, recent_error(),
          static_cast<Status>(status));
  }
}

// The first failure on a thread of the task queue, for the rest of the process. torch_npu reports it at
// the next synchronisation, by the function's name alone, and from then on drops all work without a
// word: a later call must not appear to succeed.
class QueueFailure {
 public:
  static QueueFailure& instance() {
    static QueueFailure failure;
    return failure;
  }

  void set(const char* what) {
    const std::lock_guard lock(mutex_);
    if (!failed_) {
      message_ = what;
      failed_ = true;
    }
  }

  void check(const Function& function) {
    if (failed_) [[unlikely]] {
      const std::lock_guard lock(mutex_);
      raise(Violation::runtime, function.op, function.name,
            "torch_npu's task queue has stopped, after: " + message_, Status::runtime);
    }
  }

 private:
  std::atomic<bool> failed_ = false;
  std::mutex mutex_;
  std::string message_;
};

// Hands `task` to the task queue; without a queue it runs at once.
template <typename Task>
void run(const Function& function, bool queued, Task task) {
  if (!queued) {
    RunAclCall(function.name, std::move(task));
    return;
  }
  RunAclCall(function.name, [task = std::move(task)] {
    try {
      return task();
    } catch (const c10::Error& error) {
      QueueFailure::instance().set(error.what_without_backtrace());
      throw;
    }
  });
}

// What the caller's thread has to say about determinism. The queue's thread has no view of it.
struct Determinism {
  uint32_t level = c10_npu::GetDeterministicLevel();
  bool algorithms = at::globalContext().deterministicAlgorithms();

  void apply() const { at_npu::native::ApplyDeterministicLevel(level, algorithms, true); }
};

// What a first phase returns, or what CANN kept of an earlier one.
class Prepared {
 public:
  Prepared() = default;
  ~Prepared() {
    static const auto destroy = find<int(aclOpExecutor*)>("aclDestroyAclOpExecutor");
    // An executor from the cache is CANN's own.
    if (executor && !cached && destroy) {
      destroy(executor);
    }
  }
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;

  uint64_t workspace_size = 0;
  aclOpExecutor* executor = nullptr;
  bool cached = false;
  at::Tensor workspace;
};

// CANN keeps executors of functions that allow it: with a key set, the first phase leaves its
// executor under that key, and a later call with that key takes it together with the addresses of its
// own tensors. torch_npu has one interface for callers, which compares the hash of keys, and one for
// its queue's thread, which compares keys.
//
// Finds the executor of this call, or sets the key under which the first phase will leave it.
void find_executor(const Call& call, const Determinism& determinism, const CacheParams& cores,
                   aclrtStream stream, bool on_queue_thread, Prepared& prepared) {
  static const auto usable = find<bool(const char*)>("CanUsePTACache");
  static const auto enter = find<void()>("InitPTACacheThreadLocal");
  static const auto leave = find<void()>("UnInitPTACacheThreadLocal");
  static const auto add_address = find<void(void*)>("AddTensorAddrToCachedList");
  static const auto set_hash = find<void(uint64_t)>("SetPTAHashKey");
  static const auto find_hash = find<aclOpExecutor*(uint64_t, uint64_t*)>("PTAGetExecCache");
  static const auto set_key = find<void(const uint8_t*, size_t)>("SetPTACacheHashKey");
  static const auto find_key =
      find<aclOpExecutor*(const uint8_t*, size_t, uint64_t*)>("PTAFindExecCache");
  const bool present = usable && enter && leave && add_address &&
                       (on_queue_thread ? set_key && find_key : set_hash && find_hash);
  if (!present || !usable(call.function().name.c_str())) {
    return;
  }
  ExecutorKey key;
  key.add(determinism.level);
  key.add(determinism.algorithms);
  key.add(cores);
  key.add(stream);
  key.add(std::string_view(call.function().name));
  call.add_to(key);
  enter();
  for (auto* address : key.addresses()) {
    add_address(address);
  }
  const auto bytes = key.bytes();
  if (on_queue_thread) {
    set_key(bytes.data(), bytes.size());
    prepared.executor = find_key(bytes.data(), bytes.size(), &prepared.workspace_size);
  } else {
    const auto hash = std::hash<std::string_view>()(
        {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    set_hash(hash);
    prepared.executor = find_hash(hash, &prepared.workspace_size);
  }
  prepared.cached = prepared.executor != nullptr;
  if (prepared.cached) {
    leave();
  }
}

// torch_npu's pool of host memory for executors, on the thread of the first phase. Its end also ends
// what find_executor began.
struct ExecutorMemory {
  ExecutorMemory() { InitExecCommonCtx(); }
  ~ExecutorMemory() { UnInitExecCommonCtx(); }
  ExecutorMemory(const ExecutorMemory&) = delete;
  ExecutorMemory& operator=(const ExecutorMemory&) = delete;
};

// The first phase and the workspace, on the thread that runs it.
void prepare(Call& call, const Determinism& determinism, const CacheParams& cores,
             aclrtStream stream, bool on_queue_thread, Prepared& prepared) {
  determinism.apply();
  find_executor(call, determinism, cores, stream, on_queue_thread, prepared);
  if (!prepared.cached) {
    const ExecutorMemory memory;
    check_status(call.function(), "GetWorkspaceSize",
                 call.first_phase(&prepared.workspace_size, &prepared.executor));
  }
  if (prepared.workspace_size != 0) {
    prepared.workspace = at_npu::native::allocate_workspace(prepared.workspace_size, stream);
  }
}

// The second phase, which consumes the executor whatever it returns.
int execute(Call& call, Prepared& prepared, aclrtStream stream) {
  using SecondPhase = int(void*, uint64_t, aclOpExecutor*, aclrtStream);
  auto* const workspace =
      prepared.workspace_size ? prepared.workspace.storage().mutable_data() : nullptr;
  const int status = reinterpret_cast<SecondPhase*>(call.function().second_phase)(
      workspace, prepared.workspace_size, std::exchange(prepared.executor, nullptr), stream);
  call.release();
  prepared.workspace.reset();
  if (!prepared.cached) {
    ReleaseExecCommonCtx();
  }
  check_status(call.function(), "", status);
  return status;
}

}  // namespace

Function::Function(const char* op, const char* name)
    : op(op),
      name(name),
      first_phase(GetOpApiFuncAddr((this->name + "GetWorkspaceSize").c_str())),
      second_phase(GetOpApiFuncAddr(name)) {
  const auto soc = soc_name();
  if (!product_of_soc(soc)) {
    raise(Violation::not_implemented, op, "product",
          c10::str("expected Ascend 910B, 910_93, 950 or 310P, got SoC '", soc, "'"));
  }
  if (!first_phase || !second_phase) {
    raise(Violation::not_implemented, op, name,
          "is not in this CANN (needs one whose libopapi.so, or a libcust_opapi.so, has it)",
          Status::runtime);
  }
}

void check_device(const Function& function, int position, const c10::Device& device,
                  std::optional<c10::Device>& first) {
  if (!first) {
    first = device;
  }
  if (device != *first || !device.is_privateuseone()) [[unlikely]] {
    raise(Violation::value, function.op, c10::str("argument ", position, " of ", function.name),
          c10::str("expected a tensor on ", *first, ", got one on ", device));
  }
}

void enqueue(c10::Device device, std::shared_ptr<Call> call) {
  const auto& function = call->function();
  QueueFailure::instance().check(function);
  const c10::DeviceGuard guard(device);
  auto* const stream = GetAclStream();
  const Determinism determinism;
  const auto cores = GetCacheParams();
  const auto level = OpApiGetTaskQueueEnable();
  if (level == 2) {
    run(function, /*queued=*/true, [call = std::move(call), determinism, cores, stream] {
      InitExecSubTheadCtx(stream);
      Prepared prepared;
      prepare(*call, determinism, cores, stream, /*on_queue_thread=*/true, prepared);
      return execute(*call, prepared, stream);
    });
    return;
  }
  auto prepared = std::make_shared<Prepared>();
  prepare(*call, determinism, cores, stream, /*on_queue_thread=*/false, *prepared);
  run(function, /*queued=*/level == 1,
      [call = std::move(call), prepared = std::move(prepared), stream] {
        InitExecSubTheadCtx(stream);
        return execute(*call, *prepared, stream);
      });
}

}  // namespace ascend_attn::aclnn
