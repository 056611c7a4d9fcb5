#include "python/task_limits.h"

#include <optional>
#include <vector>

#include "core/device_in_force.h"

namespace py = pybind11;

namespace ascend_attn {
namespace {

PyObject* variable() {
  static PyObject* const variable = PyContextVar_New("ascend_attn_ops.limits", nullptr);
  return variable;
}

// Returns the open blocks of the task, the innermost last: tuples of owner, override and the scope
// of the thread that the block began in.
py::tuple open_blocks() {
  PyObject* value = nullptr;
  if (PyContextVar_Get(variable(), nullptr, &value) != 0) {
    throw py::error_already_set();
  }
  return value ? py::reinterpret_steal<py::tuple>(value) : py::tuple();
}

void set_open_blocks(const py::tuple& blocks) {
  const auto token = py::reinterpret_steal<py::object>(PyContextVar_Set(variable(), blocks.ptr()));
  if (!token) {
    throw py::error_already_set();
  }
}

int64_t override_of_task() {
  const py::gil_scoped_acquire gil;
  const auto blocks = open_blocks();
  return blocks.empty() ? 0 : blocks[blocks.size() - 1].cast<py::tuple>()[1].cast<int64_t>();
}

}  // namespace

void enter_limits(py::handle owner, int64_t override) {
  auto& thread = limits_of_thread();
  set_open_blocks(open_blocks() + py::make_tuple(py::make_tuple(owner, override, thread.scope)));
  ++thread.open_blocks;
  thread.override = kLimitsOfTask;
  // Reading it takes the GIL, which a process without any block is spared.
  set_limits_override_of_task(&override_of_task);
}

void leave_limits(py::handle owner) {
  // A generator's block may end in another context than it began in, which does not have the block.
  const py::list blocks(open_blocks());
  for (auto i = blocks.size(); i-- > 0;) {
    const py::tuple block = blocks[i];
    if (block[0].ptr() != owner.ptr()) {
      continue;
    }
    blocks.attr("pop")(i);
    set_open_blocks(py::tuple(blocks));
    auto& thread = limits_of_thread();
    // A block that outlives its scope, or ends on another thread, has no part in this one.
    if (block[2].cast<uint64_t>() == thread.scope && --thread.open_blocks == 0) {
      thread.override = thread.without_blocks;
    }
    return;
  }
}

}  // namespace ascend_attn
