#include "npu/aclnn/prepared_call.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch_npu/csrc/core/npu/NPUException.h>

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "npu/aclnn/library.h"

namespace ascend_attn::aclnn {
namespace {

// CANN's message for the latest error of this thread.
std::string recent_error() {
  const char* message = c10_npu::c10_npu_get_error_message();
  return on_one_line(message && *message ? message : "CANN gave no message");
}

void check_status(const Function& function, int status, std::string_view called,
                  const char* phase = "") {
  if (status != ACL_SUCCESS) [[unlikely]] {
    raise(Violation::runtime, function.op, c10::str(called, phase), recent_error(),
          static_cast<Status>(status));
  }
}

// Calls a first phase with the determinism that its caller's thread has, or that the call asks for.
//
// A first phase reads determinism from the context of its thread, and all threads of a device have
// one context, so a switch reaches the first phases that other threads make meanwhile:
// - those of this library wait for it;
// - those of torch_npu's operators see it, at levels 0 and 1 of the task queue: they take no lock
//   that we could hold. At level 2 one thread makes all first phases of a device.
// A context of our own would confine the switch, but CANN documents nowhere that an executor made
// in one context can be launched on a stream of another. A context that is as the call wants it is
// left alone, so only a call that differs from torch.use_deterministic_algorithms switches.
template <typename Task>
void with_determinism(const Function& function, const CallContext& context, const Task& task) {
  static std::shared_mutex mutex;
  if (!context.deterministic) {
    const std::shared_lock lock(mutex);
    context.determinism.apply();
    task();
    return;
  }
  const std::unique_lock lock(mutex);
  context.determinism.apply();
  static const decltype(&aclrtCtxGetSysParamOpt) get =
      find_runtime_function("aclrtCtxGetSysParamOpt");
  static const decltype(&aclrtCtxSetSysParamOpt) set =
      find_runtime_function("aclrtCtxSetSysParamOpt");
  check_implemented(
      get && set, function.op, "deterministic",
      "expected a CANN with aclrtCtxSetSysParamOpt, which switches determinism on and off");
  const int64_t wanted = *context.deterministic;
  int64_t before = 0;
  // A context whose value was never set has none to read: it is not deterministic.
  if (get(ACL_OPT_DETERMINISTIC, &before) != ACL_SUCCESS) {
    before = 0;
  }
  if (before == wanted) {
    task();
    return;
  }
  const auto switch_to = [&](int64_t value) {
    check_status(function, set(ACL_OPT_DETERMINISTIC, value), "aclrtCtxSetSysParamOpt");
  };
  switch_to(wanted);
  // An error that is on its way says more than a second one.
  auto restore = c10::make_scope_exit([&] { set(ACL_OPT_DETERMINISTIC, before); });
  task();
  restore.release();
  switch_to(before);
}

}  // namespace

std::string on_one_line(std::string text) {
  std::ranges::replace(text, '\n', ' ');
  return text;
}

CallContext::CallContext(const Function& function, ContextDeterminism deterministic,
                         c10::ArrayRef<Fill> fills)
    : stream(GetAclStream()), deterministic(deterministic), fills(fills) {
  if (function.reuses_executor) {
    cores = core_limits(GetCacheParams());
  }
}

void CallContext::add_to(ExecutorKey& key) const {
  key.add(deterministic ? static_cast<int>(*deterministic) : -1);
  key.add(determinism.level);
  key.add(determinism.algorithms);
  key.add(cores);
  key.add(stream);
}

void PreparedCall::Destroy::operator()(aclOpExecutor* executor) const {
  static int (*const destroy)(aclOpExecutor*) = find_function("aclDestroyAclOpExecutor");
  if (destroy) {
    destroy(executor);
  }
}

PreparedCall::PreparedCall(const Function& function, const Arguments& arguments,
                           const CallContext& context, CallThread thread)
    : PreparedCall(function, context) {
  with_determinism(function, context, [&] {
    const ExecutorCache cache(thread);
    if (auto* const key = cache.key_of(function.name, function.reuses_executor)) {
      key->add(std::string_view(function.name));
      context.add_to(*key);
      arguments.add_to(*key);
      executor_.reset(cache.find(*key, &workspace_size_));
    }
    if (!executor_) {
      make_executor(arguments);
    }
  });
}

// Calls the first phase, with CANN's pool of host memory for executors on this thread.
void PreparedCall::make_executor(const Arguments& arguments) {
  static int (*const enter)(void*, bool) = find_function("InitHugeMemThreadLocal");
  static void (*const leave)(void*, bool) = find_function("UnInitHugeMemThreadLocal");
  if (enter) {
    enter(nullptr, false);
    has_memory_ = true;
  }
  bool succeeded = false;
  const auto scope = c10::make_scope_exit([&] {
    if (!succeeded) {
      end();
    }
    if (leave) {
      leave(nullptr, false);
    }
  });
  aclOpExecutor* executor = nullptr;
  int status = 0;
  try {
    handles_ = arguments.first_phase(function_, status, &workspace_size_, &executor);
  } catch (const NoHandle& missing) {
    raise(Violation::runtime, function_.op, function_.name,
          c10::str(missing.maker, " gave no handle: ", recent_error()), Status::runtime);
  }
  executor_.reset(executor);
  check_status(function_, status, function_.name, "GetWorkspaceSize");
  succeeded = true;
}

int PreparedCall::execute(void* workspace) {
  for (const auto& fill : context_.fills) {
    check_status(function_,
                 aclrtMemsetAsync(fill.data, fill.bytes, fill.value, fill.bytes, context_.stream),
                 function_.name);
  }
  using SecondPhase = int(void*, uint64_t, aclOpExecutor*, aclrtStream);
  // It consumes the executor, whatever it returns.
  const int status = reinterpret_cast<SecondPhase*>(function_.second_phase)(
      workspace, workspace_size_, executor_.release(), context_.stream);
  end();
  check_status(function_, status, function_.name);
  return status;
}

// When an executor ends, CANN makes its memory the one that this thread releases. Its handles are
// in the same memory.
void PreparedCall::end() {
  executor_.reset();
  handles_.reset();
  static void (*const release_memory)(void*, bool) = find_function("ReleaseHugeMem");
  if (std::exchange(has_memory_, false) && release_memory) {
    release_memory(nullptr, false);
  }
}

}  // namespace ascend_attn::aclnn
