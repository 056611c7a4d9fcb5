// The Python module `_npu`. Loading it tells the checks which device this process has.
#include <op_plugin/utils/op_api_common_base.h>
#include <torch/extension.h>
#include <torch_npu/csrc/core/npu/GetCANNInfo.h>
#include <torch_npu/csrc/framework/utils/OpPreparation.h>

#include <string>

#include "core/tensor_checks.h"
#include "npu/product.h"

namespace ascend_attn {
namespace {

bool has_aclnn(const std::string& name) {
  return GetOpApiFuncAddr((name + "GetWorkspaceSize").c_str()) && GetOpApiFuncAddr(name.c_str());
}

}  // namespace
}  // namespace ascend_attn

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace ascend_attn;
  m.def("soc_name", &soc_name);
  m.def("cann_version", [] { return GetCANNVersion("CANN"); });
  m.def("has_aclnn", &has_aclnn, "Whether the CANN of this process has an aclnn function.");
  set_npu_allocation(&at_npu::native::OpPreparation::apply_tensor_without_format);
  if (const auto product = product_of_soc(soc_name())) {
    set_default_limits(Device{*product, cann_of_version(GetCANNVersion("CANN"))});
  }
}
