#include "ops/flash_attention_score.h"

#include <torch/library.h>

#include "cpu/common/attention_rows.h"
#include "dispatch/operator.h"

namespace ascend_attn::cpu {
namespace {

void flash_attention_score(const FlashAttentionScore& op, FlashAttentionScore::Outputs& outputs) {
  const DenseAttention attention(op);
  const auto& [out, softmax_max, softmax_sum] = outputs;
  if (attention.layout == Layout::TND) {
    for (const auto& output : {out, softmax_max, softmax_sum}) {
      zero_unused_tokens(output, output.size(0), attention.sequences, &Sequence::queries);
    }
  }
  const auto by_head = attention.by_head(out, attention.heads);
  if (op.options.padded()) {
    for (const auto& output : {by_head, softmax_max, softmax_sum}) {
      attention.fill_padding(output, 0);
    }
  }
  attend(attention, {by_head, softmax_max, softmax_sum, {}, {}});
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<FlashAttentionScore, flash_attention_score>(m);
}

}  // namespace
}  // namespace ascend_attn::cpu

void ascend_attn::FlashAttentionScore::check_values() const {
  const cpu::DenseAttention checked(*this);
}
