// The streams of the simulated CANN, and what graphs record of them.
#pragma once

#include <acl/acl.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "ascendcl/runtime.h"

namespace cann_sim {

struct Stream;

using Tasks = std::vector<Task>;
// The handle of a task group is the address of its Tasks, which an update replaces.
using Graph = std::deque<Tasks>;
// The number of tasks of each captured stream that happen before something.
using Past = std::map<const Stream*, size_t>;

// The memory as it was before an operator of torch ran in a capture: a device runs nothing then.
struct Saved {
  void* address;
  std::vector<char> data;
};
void put_back(std::vector<Saved>& saved);

// The object behind aclmdlRI; replays that wait outlive it.
struct Model {
  std::shared_ptr<Graph> graph = std::make_shared<Graph>(1);
};

// A capture from its beginning to its end, of the stream that it began on and of those that have
// joined.
struct Capture {
  const Stream* origin;
  aclmdlRICaptureMode mode;
  std::unique_ptr<Model> model = std::make_unique<Model>();
  std::set<Stream*> streams = {};
  Past tasks = {};
  std::vector<Saved> saved = {};
  bool in_group = false;
  bool valid = true;
  bool ended = false;
};

struct Stream {
  int device;
  int id;
  std::shared_ptr<Capture> capture = nullptr;
  Past past = {};
  // The group that is being updated, and what it is going to have.
  Tasks* group = nullptr;
  Tasks update = {};
  std::vector<Saved> saved = {};
  // The first of them waits for an event.
  std::deque<Task> waiting = {};
  bool is_running_waiting = false;
  // Cube and vector cores, of an Ascend 910B2: a limit that only faults of kernels depend on.
  std::array<uint32_t, 2> cores = {24, 48};

  // Where tasks are recorded instead of running; null where they run.
  Tasks* recording() {
    return group ? &update : capture ? &capture->model->graph->back() : nullptr;
  }
};

// All streams and captures, and what orders the threads that use them. No task runs under it.
struct State {
  std::mutex mutex;
  std::map<const Stream*, std::shared_ptr<Stream>> streams;
  std::set<Capture*> captures;
};
State& state();

// How many captures and updates there are at the moment.
std::atomic<int>& recordings();

inline Stream& as_stream(aclrtStream stream) { return *static_cast<Stream*>(stream); }

// A call's error, for torch_npu.
aclError failed(aclError status, std::string message);
std::string name_of(const Stream& stream);

// This thread's mode: how strict captures are with calls that wait.
aclmdlRICaptureMode& thread_mode();

}  // namespace cann_sim
