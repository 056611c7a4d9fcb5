#include "ops/flash_attention_score.h"

#include "cpu/common/dense_attention_grad.h"
#include "dispatch/operator.h"
#include "dispatch/registration.h"

namespace ascend_attn::cpu {
namespace {

void flash_attention_score_extended_grad(const FlashAttentionScoreExtendedGrad& op,
                                         FlashAttentionScoreExtendedGrad::Outputs& outputs) {
  const auto& [dq, dk, dv, d_sink, dq_rope, dk_rope] = outputs;
  const auto if_given = [](bool given, const at::Tensor& gradient) {
    return given ? gradient : at::Tensor();
  };
  const bool ropes = op.extra.query_rope.has_value();
  differentiate(DenseAttentionGrad(op), {.dq = dq,
                                         .dk = dk,
                                         .dv = dv,
                                         .dsink = if_given(op.extra.sink.has_value(), d_sink),
                                         .dq_rope = if_given(ropes, dq_rope),
                                         .dk_rope = if_given(ropes, dk_rope)});
}

const Registration kernels(c10::DispatchKey::CPU, [](torch::Library& m) {
  register_kernel<FlashAttentionScoreExtendedGrad, flash_attention_score_extended_grad>(m);
});

}  // namespace
}  // namespace ascend_attn::cpu

void ascend_attn::FlashAttentionScoreExtendedGrad::check_values() const {
  const cpu::DenseAttention checked(*this);
}
