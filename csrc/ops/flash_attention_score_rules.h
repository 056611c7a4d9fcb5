// The rules of FlashAttentionScore and its gradient.
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

// Checks one call. Every method raises on the first rule that is violated.
class FlashAttentionShapes {
 public:
  // `query`, `key`, `value`, num_heads, layout and the lengths.
  FlashAttentionShapes(std::string_view op, const at::Tensor& query, const at::Tensor& key,
                       const at::Tensor& value, const FlashAttentionOptions& options);

  void scores() const;   // pse_shift, pse_type, scale_value and the start indices
  void mask() const;     // atten_mask, sparse_mode, prefix, pre_tokens, next_tokens
  void dropout() const;  // drop_mask, keep_prob
  void out_like(TensorArgument argument) const;
  void statistics(TensorArgument argument) const;

  at::Tensor new_out() const;
  at::Tensor new_statistics() const;

 private:
  void layout_and_heads();
  void lengths();
  void pse_of_tensor() const;
  void pse_of_slopes() const;
  void full_mask() const;
  void compressed_mask() const;
  void prefix() const;
  void band(const Lengths& lengths) const;
  void band_of_sequences() const;

  // Of every sequence; none while one of them is symbolic.
  std::vector<Lengths> sequence_lengths() const;

  bool is_packed() const { return layout_ == Layout::TND; }
  TensorArgument query() const { return {"query", query_}; }
  c10::SymDimVector out_sizes() const;
  c10::SymDimVector statistics_sizes() const;

  std::string_view op_;
  const at::Tensor& query_;
  const at::Tensor& key_;
  const at::Tensor& value_;
  const FlashAttentionOptions& options_;
  Layout layout_;
  LimitsCheck limits_;
  // In layout TND: the number of sequences, and all tokens of all sequences.
  c10::SymInt batch_, queries_, keys_;
  c10::SymInt heads_, key_heads_, size_, value_size_;
};

}  // namespace ascend_attn
