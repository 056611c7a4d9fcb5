#include "ops/flash_attention_score.h"

#include "core/error.h"
#include "ops/flash_attention_score_rules.h"

namespace ascend_attn {
namespace {

template <typename Op>
FlashAttentionShapes check_common(const Op& op) {
  FlashAttentionShapes shapes(Op::name, op.query, op.key, op.value, op.options);
  shapes.scores();
  shapes.mask();
  shapes.dropout();
  return shapes;
}

template <typename Op>
void check_grad(const Op& op) {
  const auto shapes = check_common(op);
  shapes.out_like({"dy", op.dy});
  shapes.statistics({"softmax_max", op.softmax_max});
  shapes.statistics({"softmax_sum", op.softmax_sum});
  shapes.out_like({"attention_in", op.attention_in});
}

}  // namespace

FlashAttentionScore::Outputs FlashAttentionScore::check_and_allocate() const {
  const auto shapes = check_common(*this);
  return {shapes.new_out(), shapes.new_statistics(), shapes.new_statistics()};
}

FlashAttentionScoreGrad::Outputs FlashAttentionScoreGrad::check_and_allocate() const {
  check_grad(*this);
  return {new_like(query), new_like(key), new_like(value)};
}

FlashAttentionPseGrad::Outputs FlashAttentionPseGrad::check_and_allocate() const {
  check_grad(*this);
  check_implemented(options.pse_shift && options.pse_type <= 1, name, "pse_type",
                    "expected 0 or 1, whose pse_shift has a gradient, got ", options.pse_type);
  return {new_like(*options.pse_shift)};
}

bool is_compressed_pse(const at::Tensor& pse_shift, const c10::SymInt& queries,
                       const c10::SymInt& keys) {
  return pse_shift.dim() == 4 && pse_shift.sym_size(2) == 1024 && queries != 1024 &&
         queries == keys && queries > 1024;
}

}  // namespace ascend_attn
