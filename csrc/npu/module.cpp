// What Python asks of the NPU build. Loading it tells the checks which product this process has.
#include <op_plugin/utils/op_api_common_base.h>
#include <torch/extension.h>

#include <string>

#include "npu/product.h"

namespace ascend_attn {
namespace {

bool has_function(const std::string& name) { return GetOpApiFuncAddr(name.c_str()) != nullptr; }

}  // namespace
}  // namespace ascend_attn

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace ascend_attn;
  m.def("soc_name", &soc_name);
  m.def("has_function", &has_function, "Whether the CANN of this process has an aclnn function.");
  if (const auto product = product_of_soc(soc_name())) {
    set_device_product(*product);
  }
}
