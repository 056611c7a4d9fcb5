// Calls through torch_npu's task queue, and what becomes of them when it has stopped.
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <torch_npu/csrc/core/npu/NPUCachingAllocator.h>
#include <torch_npu/csrc/core/npu/NPUGraphsUtils.h>
#include <torch_npu/csrc/core/npu/NPUWorkspaceAllocator.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "core/error.h"
#include "npu/aclnn/launcher.h"
#include "npu/aclnn/prepared_call.h"

namespace ascend_attn::aclnn {
namespace {

thread_local bool first_phase_only = false;

// A queue that works runs an empty task in microseconds, behind others in milliseconds.
constexpr auto kProbeTime = std::chrono::seconds(5);

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

// The first failure of each device's task queue. torch_npu raises it once, by the function's name
// alone, and from then on drops the device's work without a word: a later call must not appear to
// succeed. torch_npu exports no sign that a queue works again, as after restart_device, so a later
// call asks the queue itself. The thread of a queue may end after a failure; torch_npu starts no
// other.
class QueueFailures {
 public:
  // Called on the thread of the queue of `device`.
  void add(c10::DeviceIndex device, const char* what) {
    thread_local const auto alive = std::make_shared<bool>(true);
    const std::lock_guard lock(mutex_);
    failures_.try_emplace(device, Failure{alive, on_one_line(what)});
    any_ = true;
  }

  // Raises if the queue of the current device, `device`, has stopped, unless the current stream
  // does without it.
  void check(const Function& function, c10::DeviceIndex device) {
    if (!any_ || c10_npu::getCurrentNPUStream(device).isSyncLaunchStream()) [[likely]] {
      return;
    }
    std::unique_lock lock(mutex_);
    const auto found = failures_.find(device);
    if (found == failures_.end()) {
      return;
    }
    const auto failure = found->second;
    lock.unlock();
    const bool ended = failure.thread.expired();
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

 private:
  struct Failure {
    std::weak_ptr<const bool> thread;  // expires with it
    std::string message;
  };

  std::atomic<bool> any_ = false;
  std::mutex mutex_;
  std::map<c10::DeviceIndex, Failure> failures_;
} queue_failures;

// Does the same as run(), and remembers a failure on the thread of the device's task queue.
template <typename Task>
void run_on_queue(const Function& function, c10::DeviceIndex device, Task task) {
  run(function, [caller = std::this_thread::get_id(), device, task = std::move(task)] {
    try {
      return task();
    } catch (const std::exception& error) {  // no memory, among others
      if (std::this_thread::get_id() != caller) {
        const auto* const raised = dynamic_cast<const c10::Error*>(&error);
        queue_failures.add(device, raised ? raised->what_without_backtrace() : error.what());
      }
      throw;
    }
  });
}

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

}  // namespace

thread_local const at::Tensor* GivenWorkspace::current_ = nullptr;

void set_first_phase_only(bool on) { first_phase_only = on; }

bool is_capturing() {
  return c10_npu::currentStreamCaptureStatusMayInitCtx() != c10_npu::CaptureStatus::None;
}

void enqueue(const Function& function, c10::Device device, ContextDeterminism deterministic,
             Arguments& arguments, c10::ArrayRef<Fill> fills) {
  std::optional<c10::DeviceGuard> guard;
  if (device.index() != c10_npu::current_device()) {
    guard.emplace(device);
  }
  queue_failures.check(function, device.index());
  const CallContext context(function, deterministic, fills);
  auto* const stream = context.stream;
  const auto level = OpApiGetTaskQueueEnable();
  if (level == 2 && !first_phase_only) {
    run_on_queue(function, device.index(), [&function, arguments = arguments.to_heap(), context] {
      InitExecSubTheadCtx(context.stream);
      PreparedCall call(function, *arguments, context, CallThread::queue);
      // The block that torch_npu keeps for the stream: the caller's stream is not current here.
      at::Tensor workspace;
      if (call.workspace_size() != 0) {
        workspace = at_npu::native::allocate_workspace(call.workspace_size(), context.stream);
      }
      return call.execute(workspace.defined() ? workspace.storage().mutable_data() : nullptr);
    });
    return;
  }
  const auto call =
      std::make_shared<PreparedCall>(function, arguments, context, CallThread::caller);
  if (first_phase_only) [[unlikely]] {
    return;
  }
  // From the caching allocator, as torch_npu does at these levels: the block of the stream does not
  // survive a request that is too large. Freed at the end of this function, when the call is in the
  // queue.
  c10::DataPtr workspace;
  void* address = nullptr;
  if (const auto* given = GivenWorkspace::current()) {
    address = in_given(*given, function, call->workspace_size());
  } else if (call->workspace_size() != 0) {
    workspace = c10_npu::NPUCachingAllocator::get()->allocate(call->workspace_size());
    address = workspace.get();
  }
  const auto second_phase = [call, stream, address] {
    InitExecSubTheadCtx(stream);
    return call->execute(address);
  };
  if (level == 0) {
    run(function, std::ref(second_phase));
  } else {
    run_on_queue(function, device.index(), second_phase);
  }
}

}  // namespace ascend_attn::aclnn
