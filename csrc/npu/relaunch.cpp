// The schemas of `<operator>.relaunch`, for operators whose sequence lengths are lists: a graph can
// change them between replays (csrc/npu/kernel.h).
#include <torch/library.h>

#include <string>
#include <string_view>

#include "npu/kernel.h"
#include "ops/operators.h"

namespace ascend_attn {
namespace {

using OperatorsWithLists =
    OperatorList<FlashAttentionScore, FlashAttentionScoreGrad, FlashAttentionScoreExtendedGrad,
                 PromptFlashAttention, FusedInferAttentionScore>;

std::string relaunch_schema(const char* name, std::string_view schema) {
  const auto arguments = schema.substr(0, schema.rfind(") -> "));
  return c10::str(name, ".relaunch", arguments, ", Tensor(a!) workspace, Tensor(b!)[] out) -> ()");
}

TORCH_LIBRARY_FRAGMENT(ascend, m) {
  OperatorsWithLists::for_each([&]<typename Op>() {
    m.def(relaunch_schema(Op::name, static_cast<const char*>(Op::schema)).c_str());
  });
}

}  // namespace

template <typename Op, typename Outputs, typename... Parameters>
void Relaunch<Op, Outputs(Parameters...)>::register_kernel(
    torch::Library& library, void (*kernel)(Parameters..., const at::Tensor&, at::TensorList)) {
  library.impl(c10::str(Op::name, ".relaunch").c_str(), kernel);
}
template struct Relaunch<FlashAttentionScore>;
template struct Relaunch<FlashAttentionScoreGrad>;
template struct Relaunch<FlashAttentionScoreExtendedGrad>;
template struct Relaunch<PromptFlashAttention>;
template struct Relaunch<FusedInferAttentionScore>;

}  // namespace ascend_attn
