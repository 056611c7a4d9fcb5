#include "ops/fused_infer_attention_score.h"

#include <ATen/ops/empty.h>
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
  const auto result = DenseAttention::by_head(op.infer_layout().output, out, attention.heads);
  // Beside int8 keys, the output is scaled before it is rounded.
  const bool is_quantized = op.quantization.given();
  to.out = is_quantized ? at::empty(result.sizes(), attention.query.options()) : result;
  attention.fill_padding(to.out, 0);
  if (op.return_softmax_lse) {
    const auto layout = axes_of(attention.layout).packed() ? Layout::TND : Layout::BNSD;
    to.softmax_lse = DenseAttention::by_head(layout, softmax_lse, attention.heads);
    attention.fill_padding(to.softmax_lse, -std::numeric_limits<double>::infinity());
  }
  attend(attention, to);
  if (is_quantized) {
    result.copy_(op.quantization.by_channel()
                     ? attention.times_channels(to.out, *op.quantization.value_antiquant_scale)
                     : to.out);
  }
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
