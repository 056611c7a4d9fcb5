// Argument checks of FusedInferAttentionScore.
#pragma once

#include <c10/core/SymInt.h>

#include <optional>

#include "ops/dense_shape.h"
#include "ops/fused_infer_attention_score.h"

namespace ascend_attn {

// Checks one call. Every method raises on the first violated rule.
class FusedInferRules : DenseShape {
 public:
  // Checks `query`, `key` and `value`, their layout, heads and sizes, pages, ropes and lengths.
  explicit FusedInferRules(const FusedInferAttentionScore& op);

  // Checks atten_mask, sparse_mode, pre_tokens, next_tokens, sink, scale_value and inner_precise.
  void check_options() const;
  void check_limits() const;
  at::Tensor out(OutputSource& outputs) const;
  at::Tensor softmax_lse(OutputSource& outputs) const;

 private:
  // Check what is given of int8 keys, and then each scale, where heads have `size` channels.
  void check_quantization() const;
  void check_scale(NamedTensor scale, const c10::SymInt& size) const;
  void check_scale_of_query() const;
  void check_pages();
  // Returns the shape of pages whose heads have `size` channels of `element_size` bytes.
  c10::SymDimVector page_sizes(const c10::SymInt& size, size_t element_size) const;
  void check_lengths();
  void check_ends(std::string_view argument, const Lengths& lengths,
                  const c10::SymInt& tokens) const;

  void check_size_limits() const;
  void check_value_size() const;
  void check_page_limits() const;
  void check_absorbed_limits() const;
  void check_mask_limits() const;
  void check_sink_limits() const;
  void check_quantization_limits() const;

  // Multi-head latent attention whose latents are the keys and the values.
  bool absorbed() const;
  bool is_size(int64_t size, int64_t value_size) const;
  // Returns the tokens of the longest sequence of query; none if a length is symbolic.
  std::optional<int64_t> longest_query() const;

  const FusedInferAttentionScore& op_;
  const InferLayout& form_;
  c10::SymInt page_size_ = 0;
};

}  // namespace ascend_attn
