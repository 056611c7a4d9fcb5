#include "ops/flash_attention_score.h"

#include <tuple>

#include "npu/kernel.h"

namespace ascend_attn::aclnn {
namespace {

// The functions for layout TND also take the lengths and are otherwise the same.
template <typename... Lengths>
using ScorePrototype = int(Tensor query, Tensor key, Tensor value, Tensor real_shift,
                           Tensor drop_mask, Tensor padding_mask, Tensor atten_mask,
                           IntArray prefix, Lengths... actual_seq_q_len_and_kv_len,
                           IntArray q_start_idx, IntArray kv_start_idx, double scale_value,
                           double keep_prob, int64_t pre_tokens, int64_t next_tokens,
                           int64_t head_num, Text input_layout, int64_t inner_precise,
                           int64_t sparse_mode, int64_t pse_type, Tensor softmax_max,
                           Tensor softmax_sum, Tensor softmax_out, Tensor attention_out);

template <typename... Lengths>
using ScoreGradPrototype = int(Tensor query, Tensor key, Tensor value, Tensor dy, Tensor pse_shift,
                               Tensor drop_mask, Tensor padding_mask, Tensor atten_mask,
                               Tensor softmax_max, Tensor softmax_sum, Tensor softmax_in,
                               Tensor attention_in, IntArray prefix,
                               Lengths... actual_seq_q_len_and_kv_len, IntArray q_start_idx,
                               IntArray kv_start_idx, double scale_value, double keep_prob,
                               int64_t pre_tokens, int64_t next_tokens, int64_t head_num,
                               Text input_layout, int64_t inner_precise, int64_t sparse_mode,
                               int64_t pse_type, Tensor dq, Tensor dk, Tensor dv, Tensor dpse);

template <typename Op, size_t index>
struct ReusedFunctionOf : FunctionOf<Op, index> {
  static constexpr bool reuses_executor = true;
};
struct FlashAttentionScoreFunction : ReusedFunctionOf<FlashAttentionScore, 0> {
  using Prototype = ScorePrototype<>;
};
struct FlashAttentionVarLenScoreFunction : ReusedFunctionOf<FlashAttentionScore, 1> {
  using Prototype = ScorePrototype<IntArray, IntArray>;
};
struct FlashAttentionScoreGradFunction : ReusedFunctionOf<FlashAttentionScoreGrad, 0> {
  using Prototype = ScoreGradPrototype<>;
};
struct FlashAttentionUnpaddingScoreGradFunction : ReusedFunctionOf<FlashAttentionScoreGrad, 1> {
  using Prototype = ScoreGradPrototype<IntArray, IntArray>;
};

// `before` and `after` are the arguments on either side of those that all functions share.
template <typename Dense, typename Packed, typename... Before, typename... After>
void launch_attention(const FlashAttentionOptions& options, std::tuple<Before...> before,
                      std::tuple<After...> after) {
  const auto call = [&](const auto& function, auto... lengths) {
    std::apply(
        [&](const auto&... arguments) { function(arguments...); },
        std::tuple_cat(
            before, std::tuple(list_or_empty(options.prefix), lengths...),
            std::tuple(list_or_empty(options.q_start_idx), list_or_empty(options.kv_start_idx),
                       options.scale_value, options.keep_prob, options.pre_tokens,
                       options.next_tokens, options.num_heads.expect_int(), options.layout.text(),
                       options.inner_precise, options.sparse_mode, options.pse_type),
            after));
  };
  if (options.layout == Layout::TND) {
    call(launch<Packed>, list_or_empty(options.actual_seq_lengths_query),
         list_or_empty(options.actual_seq_lengths_key));
  } else {
    call(launch<Dense>);
  }
}

void flash_attention_score(const FlashAttentionScore& op, FlashAttentionScore::Outputs& outputs) {
  const auto& [out, softmax_max, softmax_sum] = outputs;
  const auto& o = op.options;
  // Never written: the function reserves this output.
  const auto softmax_out = new_tensor({0}, op.query.options());
  launch_attention<FlashAttentionScoreFunction, FlashAttentionVarLenScoreFunction>(
      o,
      std::forward_as_tuple(op.query, op.key, op.value, o.pse_shift, o.drop_mask, std::nullopt,
                            o.atten_mask),
      std::forward_as_tuple(softmax_max, softmax_sum, softmax_out, out));
}

void flash_attention_score_grad(const FlashAttentionScoreGrad& op,
                                FlashAttentionScoreGrad::Outputs& outputs) {
  const auto& [dq, dk, dv] = outputs;
  const auto& o = op.options;
  // Never written, since the function has no gradient of pse_shift; torch_npu passes its sizes as
  // well.
  const auto dpse = o.pse_shift ? new_like(*o.pse_shift) : new_tensor({0}, op.query.options());
  launch_attention<FlashAttentionScoreGradFunction, FlashAttentionUnpaddingScoreGradFunction>(
      o,
      std::forward_as_tuple(op.query, op.key, op.value, op.dy, o.pse_shift, o.drop_mask,
                            std::nullopt, o.atten_mask, op.softmax_max, op.softmax_sum,
                            std::nullopt, op.attention_in),
      std::forward_as_tuple(dq, dk, dv, dpse));
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) {
  register_kernel<FlashAttentionScore, flash_attention_score>(m);
  register_kernel<FlashAttentionScoreGrad, flash_attention_score_grad>(m);
}

}  // namespace
}  // namespace ascend_attn::aclnn
