#include "npu/aclnn/launcher.h"

#include <ATen/Context.h>
#include <acl/acl.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <dlfcn.h>
#include <torch_npu/csrc/core/npu/GetCANNInfo.h>
#include <torch_npu/csrc/core/npu/NPUCachingAllocator.h>
#include <torch_npu/csrc/core/npu/NPUException.h>
#include <torch_npu/csrc/core/npu/NPUWorkspaceAllocator.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "core/error.h"
#include "npu/aclnn/executor_cache.h"
#include "npu/aclnn/library.h"
#include "npu/aclnn/product.h"
#include "npu/aclnn/torch_npu_compat.h"

namespace ascend_attn::aclnn {
namespace {

thread_local bool first_phase_only = false;

// A queue that works runs an empty task in microseconds, behind others in milliseconds.
constexpr auto kProbeTime = std::chrono::seconds(5);

std::string on_one_line(std::string text) {
  std::ranges::replace(text, '\n', ' ');
  return text;
}

// CANN's message for the latest error of this thread.
std::string recent_error() {
  const char* message = c10_npu::c10_npu_get_error_message();
  return on_one_line(message && *message ? message : "CANN gave no message");
}

void check_status(const Function& function, const char* phase, int status) {
  if (status != 0) [[unlikely]] {
    raise(Violation::runtime, function.op, function.name + phase, recent_error(),
          static_cast<Status>(status));
  }
}

// Runs `task` through torch_npu: on the thread of the task queue, or at once if there is no queue
// or the current stream launches synchronously.
void run(const Function& function, const std::function<int()>& task) {
  RunAclCall(function.name, task);
}

// Whether the task queue of the current device runs what is enqueued. The thread of the queue must
// be alive: without it, torch_npu waits forever when it enqueues after restart_device.
bool runs_tasks(const Function& function) {
  auto promise = std::make_shared<std::promise<void>>();
  auto done = promise->get_future();
  try {
    run(function, [promise = std::move(promise)] {
      promise->set_value();
      return 0;
    });
    // A queue that stops keeps what it has not run.
    if (done.wait_for(kProbeTime) != std::future_status::ready) {
      return false;
    }
    done.get();
    return true;
  } catch (const std::exception&) {
    // torch_npu raises the failure of a queue once, and breaks the promise of work that it drops.
    return false;
  }
}

// Becomes true when the thread that asked for it has ended.
std::shared_ptr<const std::atomic<bool>> end_of_this_thread() {
  struct End {
    std::shared_ptr<std::atomic<bool>> reached = std::make_shared<std::atomic<bool>>(false);
    ~End() { *reached = true; }
  };
  thread_local const End end;
  return end.reached;
}

// The first failure of each device's task queue. torch_npu raises it once, by the function's name
// alone, and from then on drops the device's work without a word: a later call must not appear to
// succeed. torch_npu exports no sign that a queue works again, as after restart_device, so a later
// call asks the queue itself. The thread of a queue may end after a failure; torch_npu starts no
// other.
class QueueFailures {
 public:
  static QueueFailures& instance() {
    static QueueFailures failures;
    return failures;
  }

  // Called on the thread of the queue of `device`.
  void add(c10::DeviceIndex device, const char* what) {
    const std::lock_guard lock(mutex_);
    // torch_npu's own messages have several lines.
    failures_.try_emplace(device, Failure{end_of_this_thread(), on_one_line(what)});
    any_ = true;
  }

  // Raises if the queue of the current device, `device`, has stopped, unless the current stream
  // does without it.
  void check(const Function& function, c10::DeviceIndex device) {
    if (any_ && !c10_npu::getCurrentNPUStream(device).isSyncLaunchStream()) [[unlikely]] {
      check_queue(function, device);
    }
  }

 private:
  struct Failure {
    std::shared_ptr<const std::atomic<bool>> thread_ended;
    std::string message;
  };

  void check_queue(const Function& function, c10::DeviceIndex device) {
    std::unique_lock lock(mutex_);
    const auto found = failures_.find(device);
    if (found == failures_.end()) {
      return;
    }
    const auto failure = found->second;
    lock.unlock();
    const bool ended = *failure.thread_ended;
    if (ended || !runs_tasks(function)) {
      raise(Violation::runtime, function.op, function.name,
            std::string("torch_npu's task queue has ") +
                (ended ? "ended and needs a new process" : "stopped") +
                ", after: " + failure.message,
            Status::runtime);
    }
    lock.lock();
    failures_.erase(device);
    any_ = !failures_.empty();
  }

  std::atomic<bool> any_ = false;
  std::mutex mutex_;
  std::map<c10::DeviceIndex, Failure> failures_;
};

// The same as run(), and remembers a failure on the thread of the device's task queue.
template <typename Task>
void run_on_queue(const Function& function, c10::DeviceIndex device, Task task) {
  const auto caller = std::this_thread::get_id();
  const auto note = [caller, device](const char* what) {
    if (std::this_thread::get_id() != caller) {
      QueueFailures::instance().add(device, what);
    }
  };
  run(function, [note, task = std::move(task)] {
    try {
      return task();
    } catch (const c10::Error& error) {
      note(error.what_without_backtrace());
      throw;
    } catch (const std::exception& error) {  // no memory, among others
      note(error.what());
      throw;
    }
  });
}

// Returns a function of the libraries that torch_npu is linked to, which a CANN may lack.
template <typename Signature>
Signature* loaded_function(const char* name) {
  return reinterpret_cast<Signature*>(dlsym(RTLD_DEFAULT, name));
}

// Switches determinism on or off in the context of this thread, where a call asks for it, and puts
// back what was there. torch_npu remembers what it has set last, and sets nothing that has not
// changed.
class DeterminismScope {
 public:
  DeterminismScope(const Function& function, ContextDeterminism deterministic)
      : switched_(deterministic.has_value()) {
    if (!switched_) {
      return;
    }
    static auto* const get =
        loaded_function<decltype(aclrtCtxGetSysParamOpt)>("aclrtCtxGetSysParamOpt");
    check_implemented(
        set_parameter() && get, function.op, "deterministic",
        "expected a CANN with aclrtCtxSetSysParamOpt, which switches determinism on and off");
    // A context whose value was never set has none to read: it is not deterministic.
    if (get(ACL_OPT_DETERMINISTIC, &saved_) != ACL_SUCCESS) {
      saved_ = 0;
    }
    check(function, set_parameter()(ACL_OPT_DETERMINISTIC, *deterministic));
  }
  ~DeterminismScope() {
    if (switched_) {  // an error is on its way, which says more than a second one
      set_parameter()(ACL_OPT_DETERMINISTIC, saved_);
    }
  }
  // Puts back what was there. Raises if that fails.
  void leave(const Function& function) {
    if (std::exchange(switched_, false)) {
      check(function, set_parameter()(ACL_OPT_DETERMINISTIC, saved_));
    }
  }
  DeterminismScope(const DeterminismScope&) = delete;
  DeterminismScope& operator=(const DeterminismScope&) = delete;

 private:
  static decltype(&aclrtCtxSetSysParamOpt) set_parameter() {
    static auto* const function =
        loaded_function<decltype(aclrtCtxSetSysParamOpt)>("aclrtCtxSetSysParamOpt");
    return function;
  }
  static void check(const Function& function, int status) {
    if (status != ACL_SUCCESS) [[unlikely]] {
      raise(Violation::runtime, function.op, "aclrtCtxSetSysParamOpt", recent_error(),
            static_cast<Status>(status));
    }
  }

  bool switched_;
  int64_t saved_ = 0;
};

struct DestroyExecutor {
  bool is_cached = false;  // the executor is CANN's own

  void operator()(aclOpExecutor* executor) const {
    static const auto destroy = find_function<int(aclOpExecutor*)>("aclDestroyAclOpExecutor");
    if (!is_cached && destroy) {
      destroy(executor);
    }
  }
};

// The first phase's results, which the second phase needs.
struct Prepared {
  uint64_t workspace_size = 0;
  std::unique_ptr<aclOpExecutor, DestroyExecutor> executor;
  std::shared_ptr<void> handles;  // none beside a cached executor
};

// Where a call runs, and how: what the caller's thread has to say, which the task queue's thread
// cannot know.
struct CallContext {
  CallContext(const Function& function, ContextDeterminism deterministic, c10::ArrayRef<Fill> fills)
      : stream(GetAclStream()), deterministic(deterministic), fills(fills) {
    if (function.reuses_executor) {
      cores = core_limits(GetCacheParams());
    }
  }

  void add_to(ExecutorKey& key) const {
    key.add(determinism.level);
    key.add(determinism.algorithms);
    key.add(cores);
    key.add(stream);
  }

  aclrtStream stream;
  ContextDeterminism deterministic;
  Fills fills;
  Determinism determinism;
  std::array<uint32_t, 2> cores{};
};

// Calls the first phase, with CANN's pool of host memory for executors on this thread.
Prepared make_executor(const Function& function, const Arguments& arguments) {
  static const auto enter = find_function<int(void*, bool)>("InitHugeMemThreadLocal");
  static const auto leave = find_function<void(void*, bool)>("UnInitHugeMemThreadLocal");
  if (enter) {
    enter(nullptr, false);
  }
  const auto scope = c10::make_scope_exit([] {
    if (leave) {
      leave(nullptr, false);
    }
  });
  Prepared prepared;
  aclOpExecutor* executor = nullptr;
  int status = 0;
  try {
    prepared.handles = arguments.first_phase(function, status, &prepared.workspace_size, &executor);
  } catch (const NoHandle& missing) {
    raise(Violation::runtime, function.op, function.name,
          c10::str(missing.maker, " gave no handle: ", recent_error()), Status::runtime);
  }
  prepared.executor.reset(executor);
  check_status(function, "GetWorkspaceSize", status);
  return prepared;
}

Prepared find_or_make_executor(const Function& function, const Arguments& arguments,
                               const CallContext& context, bool on_queue_thread) {
  const ExecutorCache cache(on_queue_thread);
  if (function.reuses_executor && cache.keeps(function.name)) {
    ExecutorKey key;
    key.add(std::string_view(function.name));
    context.add_to(key);
    arguments.add_to(key);
    Prepared prepared;
    if (auto* const executor = cache.find(key, &prepared.workspace_size)) {
      prepared.executor = {executor, DestroyExecutor{.is_cached = true}};
      return prepared;
    }
  } else {
    cache.keep_none();
  }
  return make_executor(function, arguments);
}

Prepared prepare(const Function& function, const Arguments& arguments, const CallContext& context,
                 bool on_queue_thread) {
  // All threads of a device share its context: first phases run side by side, and one that switches
  // determinism runs alone.
  static std::shared_mutex mutex;
  std::shared_lock shared(mutex, std::defer_lock);
  std::unique_lock exclusive(mutex, std::defer_lock);
  context.deterministic ? exclusive.lock() : shared.lock();
  context.determinism.apply();
  DeterminismScope scope(function, context.deterministic);
  auto prepared = find_or_make_executor(function, arguments, context, on_queue_thread);
  scope.leave(function);
  return prepared;
}

// The second phase, which consumes the executor whatever it returns, or gives it back to CANN.
int execute(const Function& function, Prepared& prepared, void* workspace, aclrtStream stream,
            const Fills& fills) {
  for (const auto& fill : fills) {
    check_status(function, "",
                 aclrtMemsetAsync(fill.data, fill.bytes, fill.value, fill.bytes, stream));
  }
  static const auto release_memory = find_function<void(void*, bool)>("ReleaseHugeMem");
  using SecondPhase = int(void*, uint64_t, aclOpExecutor*, aclrtStream);
  const int status = reinterpret_cast<SecondPhase*>(function.second_phase)(
      workspace, prepared.workspace_size, prepared.executor.release(), stream);
  prepared.handles.reset();
  if (release_memory && !prepared.executor.get_deleter().is_cached) {
    release_memory(nullptr, false);
  }
  check_status(function, "", status);
  return status;
}

// Memory of the stream's own, freed in its order: whoever gets it next comes later on the stream.
struct FreeInStreamOrder {
  void operator()(void* memory) const { c10_npu::NPUCachingAllocator::raw_delete(memory); }
};
using Workspace = std::unique_ptr<void, FreeInStreamOrder>;

void* in_given(const at::Tensor& tensor, const Function& function, uint64_t size) {
  const auto bytes = std::max<int64_t>(static_cast<int64_t>(size), 1);
  if (tensor.numel() == 0) {
    tensor.resize_({bytes});
  }
  if (tensor.numel() < bytes) {
    raise(Violation::value, function.op, "workspace",
          c10::str("expected ", bytes, " bytes, got ", tensor.numel(),
                   ", of a call that a graph has captured with other lengths; capture it with the "
                   "longest ones"));
  }
  return tensor.mutable_data_ptr();
}

// Whether tensors of an aclFormat have their elements in blocks that strides do not tell of.
bool is_private(int format) {
  constexpr std::array kPlain{ACL_FORMAT_ND,    ACL_FORMAT_NCHW, ACL_FORMAT_NCL,
                              ACL_FORMAT_NCDHW, ACL_FORMAT_NC,   ACL_FORMAT_NHWC,
                              ACL_FORMAT_NDHWC, ACL_FORMAT_HWCN, ACL_FORMAT_UNDEFINED};
  return std::ranges::find(kPlain, format) == kPlain.end();
}

}  // namespace

thread_local const at::Tensor* GivenWorkspace::current_ = nullptr;

void set_first_phase_only(bool on) { first_phase_only = on; }

Function::Function(const char* op, const char* name, bool reuses_executor)
    : op(op),
      name(name),
      reuses_executor(reuses_executor),
      first_phase(GetOpApiFuncAddr((this->name + "GetWorkspaceSize").c_str())),
      second_phase(GetOpApiFuncAddr(name)) {
  const auto soc = soc_name();
  if (!product_of_soc(soc)) {
    raise(Violation::not_implemented, op, "product",
          c10::str("expected Ascend 910B, 910_93, 950 or 310P, got SoC '", soc, "'"));
  }
  if (!first_phase || !second_phase) {
    const auto version = GetCANNVersion("CANN");
    raise(Violation::not_implemented, op, name,
          c10::str("is not in this CANN", version.empty() ? "" : " " + version,
                   " (needs one whose libopapi.so, or a libcust_opapi.so, has it)"),
          Status::runtime);
  }
}

void check_tensor(const Function& function, int position, const TensorArgument& tensor,
                  std::optional<c10::Device>& first) {
  const auto& device = tensor.device();
  if (!first) {
    first = device;
  }
  const auto name = [&] { return c10::str("argument ", position, " of ", function.name); };
  if (device != *first || !device.is_privateuseone()) [[unlikely]] {
    raise(Violation::value, function.op, name(),
          c10::str("expected a tensor on ", *first, ", got one on ", device));
  }
  if (is_private(tensor.format())) [[unlikely]] {
    raise(Violation::value, function.op, name(),
          c10::str("expected a tensor of a plain format, got one of the NPU's private format ",
                   tensor.format(), "; torch_npu.npu_format_cast(tensor, ", int{ACL_FORMAT_ND},
                   ") converts it"));
  }
}

void enqueue(const Function& function, c10::Device device, ContextDeterminism deterministic,
             Arguments& arguments, c10::ArrayRef<Fill> fills) {
  std::optional<c10::DeviceGuard> guard;
  if (device.index() != c10_npu::current_device()) {
    guard.emplace(device);
  }
  QueueFailures::instance().check(function, device.index());
  const CallContext context(function, deterministic, fills);
  auto* const stream = context.stream;
  if (first_phase_only) [[unlikely]] {
    prepare(function, arguments, context, /*on_queue_thread=*/false);
    return;
  }
  const auto level = OpApiGetTaskQueueEnable();
  if (level == 2) {
    run_on_queue(
        function, device.index(), [&function, arguments = arguments.to_heap(), context, stream] {
          InitExecSubTheadCtx(stream);
          auto prepared = prepare(function, *arguments, context, /*on_queue_thread=*/true);
          // The block that torch_npu keeps for the stream: the caller's stream is not current here.
          at::Tensor workspace;
          if (prepared.workspace_size != 0) {
            workspace = at_npu::native::allocate_workspace(prepared.workspace_size, stream);
          }
          auto* const address = workspace.defined() ? workspace.storage().mutable_data() : nullptr;
          return execute(function, prepared, address, stream, context.fills);
        });
    return;
  }
  auto prepared = prepare(function, arguments, context, /*on_queue_thread=*/false);
  // From the caching allocator, as torch_npu does at these levels: the block of the stream does not
  // survive a request that is too large. Freed at the end of this function, when the call is in the
  // queue.
  Workspace workspace;
  void* address = nullptr;
  if (const auto* given = GivenWorkspace::current()) {
    address = in_given(*given, function, prepared.workspace_size);
  } else if (prepared.workspace_size != 0) {
    workspace.reset(
        c10_npu::NPUCachingAllocator::raw_alloc_with_stream(prepared.workspace_size, stream));
    address = workspace.get();
  }
  const auto second_phase = [&function, address, stream,
                             fills = context.fills](Prepared& prepared) {
    InitExecSubTheadCtx(stream);
    return execute(function, prepared, address, stream, fills);
  };
  if (level == 0) {
    run(function, [&] { return second_phase(prepared); });
  } else {
    run_on_queue(function, device.index(),
                 [second_phase, prepared = std::make_shared<Prepared>(std::move(prepared))] {
                   return second_phase(*prepared);
                 });
  }
}

}  // namespace ascend_attn::aclnn
