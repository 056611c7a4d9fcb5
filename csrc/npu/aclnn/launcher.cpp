#include "npu/aclnn/launcher.h"

#include <acl/acl.h>
#include <torch_npu/csrc/core/npu/GetCANNInfo.h>

#include <algorithm>
#include <array>

#include "core/error.h"
#include "npu/aclnn/library.h"
#include "npu/aclnn/product.h"

namespace ascend_attn::aclnn {
namespace {

// Whether tensors of an aclFormat have their elements in blocks that strides do not tell of.
bool is_private(int format) {
  constexpr std::array kPlain{ACL_FORMAT_ND,    ACL_FORMAT_NCHW, ACL_FORMAT_NCL,
                              ACL_FORMAT_NCDHW, ACL_FORMAT_NC,   ACL_FORMAT_NHWC,
                              ACL_FORMAT_NDHWC, ACL_FORMAT_HWCN, ACL_FORMAT_UNDEFINED};
  return std::ranges::find(kPlain, format) == kPlain.end();
}

}  // namespace

Function::Function(const char* op, const char* name, bool reuses_executor, Origin origin)
    : op(op), name(name), reuses_executor(reuses_executor) {
  const auto find = origin == Origin::cann_alone ? find_function_of_cann : find_function;
  first_phase = find(this->name + "GetWorkspaceSize").address;
  second_phase = find(this->name).address;
  const auto soc = soc_name();
  if (!product_of_soc(soc)) {
    raise(Violation::not_implemented, op, "product",
          c10::str("expected Ascend 910B, 910_93, 950 or 310P, got SoC '", soc, "'"));
  }
  if (!first_phase || !second_phase) {
    const auto version = GetCANNVersion("CANN");
    raise(Violation::not_implemented, op, name,
          c10::str("is not in this CANN", version.empty() ? "" : " " + version,
                   " (needs one whose libopapi.so",
                   origin == Origin::cann_alone ? "" : ", or a libcust_opapi.so,", " has it)"),
          Status::runtime);
  }
}

void check_tensor(const Function& function, int position, const TensorArgument& tensor,
                  std::optional<c10::Device>& first) {
  const auto& device = tensor.device();
  if (!first) {
    first = device;
  }
  const auto name = [&] { return c10::str("argument ", position, " of ", function.name); };
  if (device != *first || !device.is_privateuseone()) [[unlikely]] {
    raise(Violation::value, function.op, name(),
          c10::str("expected a tensor on ", *first, ", got one on ", device));
  }
  if (is_private(tensor.format())) [[unlikely]] {
    raise(Violation::value, function.op, name(),
          c10::str("expected a tensor of a plain format, got one of the NPU's private format ",
                   tensor.format(), "; torch_npu.npu_format_cast(tensor, ", int{ACL_FORMAT_ND},
                   ") converts it"));
  }
}

}  // namespace ascend_attn::aclnn
