// The Python module `_npu`. Loading it tells the checks which device this process has.
#include <pybind11/pybind11.h>
#include <torch_npu/csrc/core/npu/GetCANNInfo.h>
#include <torch_npu/csrc/framework/utils/OpPreparation.h>

#include "core/device_in_force.h"
#include "core/tensor_checks.h"
#include "npu/aclnn/launcher.h"
#include "npu/aclnn/library.h"
#include "npu/aclnn/product.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace ascend_attn;
  m.def("soc_name", &soc_name);
  m.def("cann_version", [] { return GetCANNVersion("CANN"); });
  m.def("has_aclnn", &aclnn::has_function,
        "Whether the CANN of this process has an aclnn function.");
  m.def("set_first_phase_only", &aclnn::set_first_phase_only,
        "End calls of this thread after their first phase, without a launch.");
  set_npu_allocation(&at_npu::native::OpPreparation::apply_tensor_without_format);
  if (const auto device = device_of_process()) {
    set_default_limits(device);
  }
  const auto version = GetCANNVersion("CANN");
  if (is_newer_than_known(version) &&
      PyErr_WarnFormat(PyExc_UserWarning, 1,
                       "ascend_attn_ops: CANN %s is newer than all versions that it knows; the "
                       "limits of %s apply",
                       version.c_str(), std::string(cann_name(kNewestCann)).c_str()) != 0) {
    throw pybind11::error_already_set();
  }
}
