#include "ops/fused_infer_attention_score.h"

#include <torch/library.h>

#include <limits>

#include "cpu/common/attention_rows.h"
#include "dispatch/operator.h"

namespace ascend_attn::cpu {
namespace {

void fused_infer_attention_score(const FusedInferAttentionScore& op,
                                 FusedInferAttentionScore::Outputs& outputs) {
  if (op.query.numel() == 0) {
    return;
  }
  const DenseAttention attention(op);
  const auto& [out, softmax_lse] = outputs;
  DenseOutputs to;
  to.out = DenseAttention::by_head(op.infer_layout().output, out, attention.heads);
  attention.fill_padding(to.out, 0);
  if (op.return_softmax_lse) {
    const auto layout = axes_of(attention.layout).packed() ? Layout::TND : Layout::BNSD;
    to.softmax_lse = DenseAttention::by_head(layout, softmax_lse, attention.heads);
    attention.fill_padding(to.softmax_lse, -std::numeric_limits<double>::infinity());
  }
  attend(attention, to);
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<FusedInferAttentionScore, fused_infer_attention_score>(m);
}

}  // namespace
}  // namespace ascend_attn::cpu

void ascend_attn::FusedInferAttentionScore::check_values() const {
  if (query.numel() != 0) {
    const cpu::DenseAttention checked(*this);
  }
}
