// Fake tensors need the checks and the outputs, and nothing else.
#include "ops/operators.h"

namespace ascend_attn {
namespace {

template <typename Op>
void no_values(const Op&, typename Op::Outputs&) {}

template <typename... Ops>
void register_meta(OperatorList<Ops...>, torch::Library& library) {
  (register_kernel<Ops, no_values<Ops>>(library), ...);
}

TORCH_LIBRARY_IMPL(ascend, Meta, m) {
  register_meta(Operators(), m);
  register_meta(OperatorList<FlashAttentionPseGrad>(), m);
}

}  // namespace
}  // namespace ascend_attn
