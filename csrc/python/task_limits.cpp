#include "python/task_limits.h"

#include <pybind11/pybind11.h>

#include "core/device_in_force.h"

namespace py = pybind11;

namespace ascend_attn {
namespace {

PyObject* variable() {
  static PyObject* const variable = PyContextVar_New("ascend_attn_ops.limits", nullptr);
  return variable;
}

int64_t override_of_task() {
  const py::gil_scoped_acquire gil;
  PyObject* value = nullptr;
  if (PyContextVar_Get(variable(), nullptr, &value) != 0) {
    throw py::error_already_set();
  }
  return value ? py::reinterpret_steal<py::int_>(value).cast<int64_t>() : 0;
}

void set_override_of_task(int64_t override) {
  const auto token =
      py::reinterpret_steal<py::object>(PyContextVar_Set(variable(), py::int_(override).ptr()));
  if (!token) {
    throw py::error_already_set();
  }
}

}  // namespace

LimitsBefore enter_limits(int64_t override) {
  const LimitsBefore before{override_of_task(), limits_override_of_thread()};
  set_override_of_task(override);
  // In a backward, say: the block that is entered last is in force.
  set_limits_override_of_thread(kLimitsOfTask);
  // Reading it takes the GIL, which a process without any block is spared.
  set_limits_override_of_task(&override_of_task);
  return before;
}

void leave_limits(int64_t of_task, int64_t of_thread) {
  // Not by its token: a generator's block may end in another context than it began in.
  set_override_of_task(of_task);
  set_limits_override_of_thread(of_thread);
}

}  // namespace ascend_attn
