// The schemas of `<operator>.relaunch`, for operators whose sequence lengths are lists: a graph can
// change them between replays (csrc/npu/kernel.h).
#include <torch/library.h>

#include <string>
#include <string_view>

#include "ops/operators.h"

namespace ascend_attn {
namespace {

using OperatorsWithLists =
    OperatorList<FlashAttentionScore, FlashAttentionScoreGrad, PromptFlashAttention>;

std::string with_outputs(const char* name, std::string_view schema) {
  const auto arguments = schema.substr(0, schema.rfind(") -> "));
  return std::string(name) + ".relaunch" + std::string(arguments) +
         ", Tensor(a!) workspace, Tensor(b!)[] out) -> ()";
}

template <typename... Ops>
void define(OperatorList<Ops...>, torch::Library& library) {
  (library.def(with_outputs(Ops::name, static_cast<const char*>(Ops::schema)).c_str()), ...);
}

TORCH_LIBRARY_FRAGMENT(ascend, m) { define(OperatorsWithLists(), m); }

}  // namespace
}  // namespace ascend_attn
