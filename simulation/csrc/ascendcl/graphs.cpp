// Graphs of the simulated CANN: the tasks of the captured streams, in the order of the program.
#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "ascendcl/stream_order.h"
#include "ascendcl/streams.h"

using namespace cann_sim;

extern "C" {

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  std::swap(*mode, thread_mode());
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode) {
  const std::lock_guard lock(state().mutex);
  auto& origin = as_stream(stream);
  if (origin.capture) {
    return failed(ACL_ERROR_RT_STREAM_CAPTURED, name_of(origin) + " is being captured");
  }
  origin.capture = std::make_shared<Capture>(Capture{&origin, mode});
  origin.capture->streams.insert(&origin);
  state().captures.insert(origin.capture.get());
  ++recordings();
  // torch_npu writes the seed of random numbers here just before, and some releases again on the
  // stream of each replay, without waiting: that the capture lies between is all that orders them.
  host_waits_for(recorded(stream));
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus* status,
                                aclmdlRI* graph) {
  const std::lock_guard lock(state().mutex);
  const auto* capture = stream ? as_stream(stream).capture.get() : nullptr;
  *status = !capture         ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
            : capture->valid ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE
                             : ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED;
  if (graph) {
    *graph = capture ? capture->model.get() : nullptr;
  }
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI* graph) {
  const std::lock_guard lock(state().mutex);
  *graph = nullptr;
  const auto capture = as_stream(stream).capture;
  if (!capture) {
    return failed(ACL_ERROR_RT_STREAM_NOT_CAPTURED,
                  name_of(as_stream(stream)) + " is not being captured");
  }
  if (capture->origin != stream) {
    return failed(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED,
                  "the capture began on " + name_of(*capture->origin));
  }
  const auto known = as_stream(stream).past;
  for (auto* captured : capture->streams) {
    captured->capture = nullptr;
    captured->past.clear();
  }
  capture->ended = true;
  --recordings();
  put_back(capture->saved);
  state().captures.erase(capture.get());
  if (!capture->valid) {
    return failed(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED,
                  "the capture became invalid when a call failed that cannot be captured");
  }
  for (const auto& [captured, count] : capture->tasks) {
    if (const auto found = known.find(captured); found == known.end() || found->second < count) {
      return failed(ACL_ERROR_RT_STREAM_UNJOINED,
                    name_of(*captured) + " has work in the capture that " +
                        name_of(*capture->origin) + " does not wait for");
    }
  }
  // Also with a group of tasks that has no end: a call in it failed, and has said why.
  *graph = capture->model.release();
  return ACL_SUCCESS;
}
aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream stream) {
  // A replay that has to wait runs the tasks that the graph has when the wait ends.
  const auto graph = static_cast<Model*>(model)->graph;
  for (auto& part : *graph) {
    for (size_t i = 0; i < part.size(); ++i) {
      const int status = submit(stream, [graph, &part, i] { return part[i](); });
      if (status != ACL_SUCCESS) {
        return status;
      }
    }
  }
  return ACL_SUCCESS;
}
aclError aclmdlRIDestroy(aclmdlRI model) {
  delete static_cast<Model*>(model);
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream) {
  const std::lock_guard lock(state().mutex);
  const auto& capture = as_stream(stream).capture;
  if (!capture || capture->in_group) {
    return failed(ACL_ERROR_RT_STREAM_NOT_CAPTURED,
                  "a group of tasks begins on a captured stream, and not in another group");
  }
  capture->in_group = true;
  capture->model->graph->emplace_back();
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureTaskGrpEnd(aclrtStream stream, aclrtTaskGrp* group) {
  const std::lock_guard lock(state().mutex);
  const auto& capture = as_stream(stream).capture;
  if (!capture || !capture->in_group) {
    return failed(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "a group of tasks ends without beginning");
  }
  capture->in_group = false;
  *group = &capture->model->graph->back();
  capture->model->graph->emplace_back();
  return ACL_SUCCESS;
}
// Until the end of the update, the stream collects what is launched on it, and runs nothing.
aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp group) {
  const std::lock_guard lock(state().mutex);
  auto& updating = as_stream(stream);
  if (updating.recording()) {
    return failed(ACL_ERROR_RT_STREAM_CAPTURED,
                  "an update begins on a stream without a capture or another update");
  }
  updating.group = static_cast<Tasks*>(group);
  updating.update.clear();
  ++recordings();
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream) {
  const std::lock_guard lock(state().mutex);
  auto& updating = as_stream(stream);
  auto* const group = std::exchange(updating.group, nullptr);
  auto update = std::exchange(updating.update, {});
  put_back(updating.saved);
  recordings() -= group ? 1 : 0;
  if (!group || group->size() != update.size()) {
    return failed(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED,
                  "an update launches what the group of tasks has: expected " +
                      std::to_string(group ? group->size() : 0) + " tasks, got " +
                      std::to_string(update.size()));
  }
  *group = std::move(update);
  return ACL_SUCCESS;
}

}  // extern "C"
