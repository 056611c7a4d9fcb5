#include "ops/flash_attention_score.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "npu/aclnn/product.h"
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

// The device computes the band in int32 and wraps around. Beyond that range a number bounds
// nothing.
int64_t within_int32(int64_t tokens) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  return std::clamp(tokens, -kMax, kMax);
}

using Ends = c10::SmallVector<int64_t, 8>;

Ends ends_of(OptionalIntList list) {
  Ends ends;
  for (const auto& end : list_or_empty(list)) {
    ends.push_back(end.expect_int());
  }
  return ends;
}

// A pack with tokens behind its sequences, of queries and of keys: from CANN 9.0 on A2 and A3 want
// one more element in both lists, which is 0. It counts as a sequence, so that `prefix` has one
// more too. Slopes and masks of every batch would need another row: with those the caller adds the
// 0.
void mark_padding(const at::Tensor& query, const at::Tensor& key,
                  const FlashAttentionOptions& options, Ends& query_ends, Ends& key_ends,
                  Ends& prefix) {
  static const bool wanted = runs_on(kA2A3.since(Cann::v9_0));
  const auto per_batch = [](OptionalTensor tensor, int64_t rank) {
    return tensor && tensor->dim() == rank && tensor->size(0) > 1;
  };
  if (per_batch(options.pse_shift, 2) || per_batch(options.atten_mask, 4)) {
    return;
  }
  const auto padded = [](const at::Tensor& tokens, const Ends& ends) {
    return !ends.empty() && ends.back() != 0 && tokens.size(0) > ends.back();
  };
  if (wanted && padded(query, query_ends) && padded(key, key_ends)) {
    query_ends.push_back(0);
    key_ends.push_back(0);
    if (!prefix.empty()) {
      prefix.push_back(0);
    }
  }
}

// `before` and `after` are the arguments on either side of those that all functions share.
template <typename Dense, typename Packed, typename... Before, typename... After>
void launch_attention(const FlashAttentionOptions& options, std::tuple<Before...> before,
                      std::tuple<After...> after) {
  auto prefix = ends_of(options.prefix);
  const auto call = [&](const auto& function, auto... lengths) {
    std::apply(
        [&](const auto&... arguments) { function(arguments...); },
        std::tuple_cat(
            before, std::tuple(std::optional(at::IntArrayRef(prefix)), lengths...),
            std::tuple(list_or_empty(options.q_start_idx), list_or_empty(options.kv_start_idx),
                       options.scale_value, options.keep_prob, within_int32(options.pre_tokens),
                       within_int32(options.next_tokens), options.num_heads.expect_int(),
                       options.layout.text(), options.inner_precise, options.sparse_mode,
                       options.pse_type),
            after));
  };
  if (options.layout == Layout::TND) {
    auto query_ends = ends_of(options.actual_seq_lengths_query);
    auto key_ends = ends_of(options.actual_seq_lengths_key);
    mark_padding(std::get<0>(before), std::get<1>(before), options, query_ends, key_ends, prefix);
    call(launch<Packed>, std::optional(at::IntArrayRef(query_ends)),
         std::optional(at::IntArrayRef(key_ends)));
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
  register_kernel_with_outputs<FlashAttentionScore, flash_attention_score>(m);
  register_kernel_with_outputs<FlashAttentionScoreGrad, flash_attention_score_grad>(m);
}

}  // namespace
}  // namespace ascend_attn::aclnn
