// Streams and events of the simulated CANN. A task runs at once, in the calling thread,
// unless its stream is captured (graphs.cpp), or waits for an event that has not happened yet: an
// external one, which graphs wait for. Then it runs when that happens, and so does whatever is
// behind it.
#include "ascendcl/streams.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ascendcl/stream_order.h"

namespace cann_sim {
namespace {

// A task that has to wait returns this.
constexpr int kNotYet = -1;

void merge(Past& past, const Past& other) {
  for (const auto& [stream, count] : other) {
    past[stream] = std::max(past[stream], count);
  }
}

// The stream whose limits of cores this thread is under.
thread_local aclrtStream stream_of_limits = nullptr;

// Waits are for this and not for the event, which may be destroyed before.
struct Occurrence {
  explicit Occurrence(bool external) : external(external), happened(!external) {}

  const bool external;  // recorded and waited for across the border of a graph
  std::atomic<bool> happened;
};

struct Event {
  explicit Event(bool external) : occurrence(std::make_shared<Occurrence>(external)) {}

  std::shared_ptr<Occurrence> occurrence;
  std::chrono::steady_clock::time_point time = std::chrono::steady_clock::now();
  Clock work = {};  // that was before it
  // While it is one of a capture.
  std::shared_ptr<Capture> capture = nullptr;
  Past past = {};
};

std::atomic<int> next_stream{0};
std::atomic<int64_t> waits{0};

// The latest kernel that failed, until a wait has reported it.
struct KernelFailure {
  std::mutex mutex;
  int status = ACL_SUCCESS;
  std::string message;
} kernel_failure;

aclError report_kernel_failure() {
  const std::lock_guard lock(kernel_failure.mutex);
  const int status = std::exchange(kernel_failure.status, ACL_SUCCESS);
  if (status != ACL_SUCCESS) {
    set_error_message(kernel_failure.message);
  }
  return status;
}

// Gives other threads some time to record what the host waits for.
template <typename Condition>
bool becomes_true(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
  while (!condition() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return condition();
}

Event* as_event(aclrtEvent event) { return static_cast<Event*>(event); }

// Runs the waiting tasks of a stream up to the first that must still wait.
aclError run_waiting(Stream& stream) {
  {
    const std::lock_guard lock(state().mutex);
    if (std::exchange(stream.is_running_waiting, true)) {
      return ACL_SUCCESS;
    }
  }
  int status = ACL_SUCCESS;
  while (status == ACL_SUCCESS) {
    Task task;
    {
      const std::lock_guard lock(state().mutex);
      if (stream.waiting.empty()) {
        break;
      }
      task = stream.waiting.front();
    }
    status = task();
    if (status != kNotYet) {
      const std::lock_guard lock(state().mutex);
      stream.waiting.pop_front();
    }
  }
  const std::lock_guard lock(state().mutex);
  stream.is_running_waiting = false;
  return status == kNotYet ? ACL_SUCCESS : status;
}

aclError happens(Occurrence& occurrence) {
  occurrence.happened = true;
  std::vector<std::shared_ptr<Stream>> streams;  // another thread may destroy them meanwhile
  {
    const std::lock_guard lock(state().mutex);
    for (const auto& [handle, stream] : state().streams) {
      if (!stream->waiting.empty()) {
        streams.push_back(stream);
      }
    }
  }
  for (const auto& stream : streams) {
    if (const auto status = run_waiting(*stream); status != ACL_SUCCESS) {
      return status;
    }
  }
  return ACL_SUCCESS;
}

// The error of a call that makes the host wait while a graph is captured. Without a stream the call
// waits for all of them, and the capture becomes invalid; waiting for one stream is only refused,
// as torch_npu's own tests expect.
aclError check_may_wait(const Stream* stream, const char* call) {
  std::unique_lock lock(state().mutex);
  for (auto* capture : state().captures) {
    const bool concerned = stream ? stream->capture.get() == capture
                                  : thread_mode() != ACL_MODEL_RI_CAPTURE_MODE_RELAXED &&
                                        capture->mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
    if (concerned) {
      capture->valid = capture->valid && stream;
      return failed(stream ? ACL_ERROR_RT_STREAM_CAPTURED : ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT,
                    std::string(call) + ": the host cannot wait for " +
                        (stream ? name_of(*stream) : "the device") +
                        " while a graph is being captured, which runs nothing yet");
    }
  }
  lock.unlock();
  std::string waiting;
  const bool runs = becomes_true([&] {
    const std::lock_guard for_streams(state().mutex);
    const auto found = std::ranges::find_if(state().streams, [&](const auto& entry) {
      const auto* other = entry.first;
      return !other->waiting.empty() &&
             (stream ? stream == other : other->device == current_device());
    });
    waiting = found == state().streams.end() ? "" : name_of(*found->first);
    return waiting.empty();
  });
  return runs ? ACL_SUCCESS
              : failed(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
                       std::string(call) + ": " + waiting +
                           " waits for an event that nothing has recorded; on a device the host "
                           "would wait forever");
}

}  // namespace

State& state() {
  static auto* instance = new State;
  return *instance;
}

aclmdlRICaptureMode& thread_mode() {
  static thread_local auto mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
  return mode;
}

aclError failed(aclError status, std::string message) {
  set_error_message("the simulated CANN: " + std::move(message));
  return status;
}

std::string name_of(const Stream& stream) { return "stream " + std::to_string(stream.id); }

bool is_capturing(aclrtStream stream) {
  if (!stream) {
    return false;
  }
  const std::lock_guard lock(state().mutex);
  return as_stream(stream).recording();
}

std::atomic<int>& recordings() {
  static std::atomic<int> count{0};
  return count;
}
bool is_recording_anywhere() { return recordings() > 0; }

void save_until_recorded(aclrtStream stream, void* address, size_t bytes) {
  if (!stream) {
    return;
  }
  const std::lock_guard lock(state().mutex);
  auto& on = as_stream(stream);
  if (on.recording()) {
    const auto* begin = static_cast<const char*>(address);
    (on.group ? on.saved : on.capture->saved).push_back({address, {begin, begin + bytes}});
  }
}

void put_back(std::vector<Saved>& saved) {
  for (; !saved.empty(); saved.pop_back()) {
    const auto& [address, data] = saved.back();
    if (device_of_address(address) >= 0) {  // not given back to the device
      std::memcpy(address, data.data(), data.size());
    }
  }
}

bool is_waiting(aclrtStream stream) {
  if (!stream) {
    return false;
  }
  const std::lock_guard lock(state().mutex);
  return !as_stream(stream).waiting.empty();
}

int submit(aclrtStream stream, Task task) {
  if (!stream) {
    return task();
  }
  auto& on = as_stream(stream);
  const auto is_queued = [&] {
    const std::lock_guard lock(state().mutex);
    if (auto* tasks = on.recording()) {
      tasks->push_back(task);
      if (!on.group) {
        on.past[&on] = ++on.capture->tasks[&on];
      }
      return true;
    }
    if (!on.waiting.empty()) {
      on.waiting.push_back(task);
      return true;
    }
    return false;
  };
  if (is_queued()) {
    return ACL_SUCCESS;
  }
  const int status = task();
  if (status != kNotYet) {
    return status;
  }
  {
    const std::lock_guard lock(state().mutex);
    on.waiting.push_back(std::move(task));
  }
  return run_waiting(on);
}

void fail_at_wait(int status, std::string message) {
  const std::lock_guard lock(kernel_failure.mutex);
  kernel_failure.status = status;
  kernel_failure.message = std::move(message);
}

aclError may_wait_for_device(const char* call) { return check_may_wait(nullptr, call); }

int device_of_stream(aclrtStream stream) {
  return stream ? as_stream(stream).device : current_device();
}
int stream_id(aclrtStream stream) { return stream ? as_stream(stream).id : -1; }
uint32_t cores_of_stream(aclrtStream stream) {
  return (stream ? as_stream(stream) : Stream{}).cores.front();
}

}  // namespace cann_sim

using namespace cann_sim;

extern "C" {

// Streams. Calls that would wait on a device are counted.

aclError aclrtSynchronizeStream(aclrtStream stream) {
  ++waits;
  if (stream) {
    if (const auto error = check_may_wait(&as_stream(stream), "aclrtSynchronizeStream")) {
      return error;
    }
  }
  host_waits_for(recorded(stream));
  return report_kernel_failure();
}
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) {
  return aclrtSynchronizeStream(stream);
}
aclError aclrtSynchronizeDevice() {
  ++waits;
  if (const auto error = check_may_wait(nullptr, "aclrtSynchronizeDevice")) {
    return error;
  }
  host_waits_for_all();
  return report_kernel_failure();
}
int64_t cann_sim_waits() { return waits; }

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  const auto created = std::make_shared<Stream>(Stream{current_device(), next_stream++});
  const std::lock_guard lock(state().mutex);
  state().streams.emplace(created.get(), created);
  *stream = created.get();
  return ACL_SUCCESS;
}
aclError aclrtCreateStream(aclrtStream* stream) {
  return aclrtCreateStreamWithConfig(stream, 0, 0);
}
aclError aclrtDestroyStream(aclrtStream stream) {
  decltype(State::streams)::node_type destroyed;  // when no lock is held
  const std::lock_guard lock(state().mutex);
  destroyed = state().streams.extract(&as_stream(stream));
  return ACL_SUCCESS;
}
aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = stream_id(stream);
  return ACL_SUCCESS;
}
aclError aclrtGetStreamResLimit(aclrtStream stream, aclrtDevResLimitType type, uint32_t* value) {
  *value = as_stream(stream).cores.at(type);
  return ACL_SUCCESS;
}
aclError aclrtSetStreamResLimit(aclrtStream stream, aclrtDevResLimitType type, uint32_t value) {
  as_stream(stream).cores.at(type) = value;
  return ACL_SUCCESS;
}
aclError aclrtResetStreamResLimit(aclrtStream stream) {
  as_stream(stream).cores = Stream{}.cores;
  return ACL_SUCCESS;
}
aclError aclrtUseStreamResInCurrentThread(aclrtStream stream) {
  stream_of_limits = stream;
  return ACL_SUCCESS;
}
aclError aclrtUnuseStreamResInCurrentThread(aclrtStream) {
  stream_of_limits = nullptr;
  return ACL_SUCCESS;
}
aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t* value) {
  const std::lock_guard lock(state().mutex);
  auto* stream = static_cast<Stream*>(stream_of_limits);
  *value = (state().streams.contains(stream) ? stream->cores : Stream{}.cores).at(type);
  return ACL_SUCCESS;
}
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  if (is_waiting(stream)) {
    *status = ACL_STREAM_STATUS_NOT_READY;
    return ACL_SUCCESS;
  }
  host_waits_for(recorded(stream));
  *status = ACL_STREAM_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

// Events.

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag) {
  *event = new Event((flag & ACL_EVENT_EXTERNAL) != 0);
  return ACL_SUCCESS;
}
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) {
  return aclrtCreateEventExWithFlag(event, flag);
}
// Keeps the latest. Where a stream launches synchronously, torch_npu destroys an event on the
// caller's thread, and its task queue waits for that event later.
aclError aclrtDestroyEvent(aclrtEvent event) {
  constexpr size_t kKept = 256;
  static auto& kept = *new std::deque<std::unique_ptr<Event>>;
  const std::lock_guard lock(state().mutex);
  kept.emplace_back(as_event(event));
  if (kept.size() > kKept) {
    kept.pop_front();
  }
  return ACL_SUCCESS;
}
aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream) {
  auto& event = *as_event(handle);
  const auto occurrence = event.occurrence;
  {
    const std::lock_guard lock(state().mutex);
    event.time = std::chrono::steady_clock::now();
    event.work = recorded(stream);
    event.capture = stream && !occurrence->external ? as_stream(stream).capture : nullptr;
    if (event.capture) {
      event.past = as_stream(stream).past;
      return ACL_SUCCESS;
    }
  }
  if (!occurrence->external) {
    occurrence->happened = false;
  }
  return submit(stream, [occurrence] { return happens(*occurrence); });
}
aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) {
  return submit(stream, [occurrence = as_event(event)->occurrence] {
    occurrence->happened = false;
    return ACL_SUCCESS;
  });
}
// A stream that waits for an event of a capture is captured from then on.
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent handle) {
  const auto& event = *as_event(handle);
  const auto occurrence = event.occurrence;
  {
    const std::lock_guard lock(state().mutex);
    stream_waits_for(stream, event.work);
    if (stream) {
      auto& waiting = as_stream(stream);
      if (event.capture && !event.capture->ended) {
        if (waiting.capture && waiting.capture != event.capture) {
          event.capture->valid = waiting.capture->valid = false;
          return failed(ACL_ERROR_STREAM_CAPTURE_CONFLICT,
                        name_of(waiting) + " waits for an event of another capture");
        }
        waiting.capture = event.capture;
        waiting.capture->streams.insert(&waiting);
        merge(waiting.past, event.past);
        return ACL_SUCCESS;
      }
      if (waiting.capture && !occurrence->external) {
        waiting.capture->valid = false;
        return failed(ACL_ERROR_RT_CAPTURE_DEPENDENCY,
                      name_of(waiting) +
                          " is captured and waits for an event that was recorded outside: record "
                          "it on a captured stream, or take torch.npu.ExternalEvent");
      }
    }
  }
  if (!occurrence->external && occurrence->happened) {
    return ACL_SUCCESS;
  }
  return submit(stream, [occurrence] { return occurrence->happened ? ACL_SUCCESS : kNotYet; });
}
aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  const auto& event = *as_event(handle);
  Clock work;
  {
    const std::lock_guard lock(state().mutex);
    if (event.capture && !event.capture->ended) {
      event.capture->valid = false;
      return failed(ACL_ERROR_RT_EVENT_CAPTURED,
                    "aclrtSynchronizeEvent: the event is one of a graph that is being captured");
    }
    work = event.work;
  }
  if (!becomes_true([&] { return event.occurrence->happened.load(); })) {
    return failed(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT,
                  "aclrtSynchronizeEvent: the event never happens; on a device the host would wait "
                  "forever");
  }
  host_waits_for(work);
  return ACL_SUCCESS;
}
aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  const auto& event = *as_event(handle);
  const std::lock_guard lock(state().mutex);
  const bool is_captured = event.capture && !event.capture->ended;
  if (is_captured || !event.occurrence->happened) {
    *status = ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return ACL_SUCCESS;
  }
  host_waits_for(event.work);
  *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  const std::lock_guard lock(state().mutex);
  const auto elapsed = as_event(end)->time - as_event(start)->time;
  *milliseconds = std::chrono::duration<float, std::milli>(elapsed).count();
  return ACL_SUCCESS;
}

}  // extern "C"
