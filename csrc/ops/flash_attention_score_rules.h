// Argument checks of FlashAttentionScore and its gradients.
#pragma once

#include <c10/core/SymInt.h>
#include <c10/util/DimVector.h>

#include <string_view>
#include <vector>

#include "core/layout.h"
#include "core/limits.h"
#include "core/sequence_lengths.h"
#include "core/tensor_checks.h"
#include "ops/flash_attention_score.h"

namespace ascend_attn {

// Checks one call. Every method raises on the first violated rule.
class FlashAttentionRules {
 public:
  // Checks `query`, `key`, `value`, num_heads, layout and the lengths.
  template <typename Op>
  explicit FlashAttentionRules(const Op& op)
      : FlashAttentionRules(Op::name, Op::limits, op.query, op.key, op.value, op.options) {}

  void check_scores() const;   // pse_shift, pse_type, scale_value and the start indices
  void check_mask() const;     // atten_mask, sparse_mode, prefix, pre_tokens, next_tokens
  void check_dropout() const;  // drop_mask, keep_prob
  void check_like_out(NamedTensor argument) const;
  void check_statistics(NamedTensor argument) const;

  at::Tensor new_out() const;
  at::Tensor new_statistics() const;

 private:
  FlashAttentionRules(std::string_view op, const OperatorLimits& limits, const at::Tensor& query,
                      const at::Tensor& key, const at::Tensor& value,
                      const FlashAttentionOptions& options);

  void read_axes();
  void check_lengths();
  void check_pse_tensor() const;
  void check_pse_slopes() const;
  void check_full_mask() const;
  void check_compressed_mask() const;
  void check_prefix() const;
  void check_band(const Sequence& sequence) const;
  void check_bands_of_sequences() const;

  // Empty while a length is symbolic.
  std::vector<Sequence> sequences() const;

  bool is_packed() const { return axes_.packed(); }
  NamedTensor query() const { return {"query", query_}; }
  c10::SymDimVector out_sizes() const;
  c10::SymDimVector statistics_sizes() const;

  std::string_view op_;
  const at::Tensor& query_;
  const at::Tensor& key_;
  const at::Tensor& value_;
  const FlashAttentionOptions& options_;
  Layout layout_;
  LayoutAxes axes_;
  LimitsCheck limits_;
  // In layout TND: the number of sequences, and the total number of tokens.
  c10::SymInt batch_, queries_, keys_;
  c10::SymInt heads_, key_heads_, head_size_, value_head_size_;
};

}  // namespace ascend_attn
