// Argument checks of FusedInferAttentionScore.
#pragma once

#include <c10/core/SymInt.h>

#include <optional>
#include <string_view>

#include "core/device_limits.h"
#include "core/layout.h"
#include "core/tensor_checks.h"
#include "ops/fused_infer_attention_score.h"

namespace ascend_attn {

// Checks one call. Every method raises on the first violated rule.
class FusedInferRules {
 public:
  // Checks `query`, `key` and `value`, their layout, heads and sizes, pages, ropes and lengths.
  explicit FusedInferRules(const FusedInferAttentionScore& op);

  void check_mask() const;     // atten_mask, sparse_mode, pre_tokens, next_tokens
  void check_options() const;  // sink, scale_value, inner_precise
  void check_limits() const;
  at::Tensor out(OutputSource& outputs) const;
  at::Tensor softmax_lse(OutputSource& outputs) const;

 private:
  static constexpr const char* kName = FusedInferAttentionScore::name;

  void check_dtypes() const;
  void check_heads();
  void check_query();
  void check_keys();
  void check_pages();
  void check_ropes();
  // Checks that a tensor has the shape of keys, whose heads have `size` channels.
  void check_like_keys(NamedTensor argument, const c10::SymInt& size) const;
  // Returns the head size of value, or of key_rope, whose heads are key's.
  c10::SymInt size_of_keys(NamedTensor argument) const;
  void check_lengths();
  void check_packed_lengths(const char* argument, const Lengths& lengths,
                            const c10::SymInt& tokens) const;

  void check_full_mask() const;

  void check_size_limits() const;
  void check_value_size() const;
  void check_page_limits() const;
  void check_absorbed_limits() const;
  void check_mask_limits() const;
  void check_sink_limits() const;

  bool paged() const { return op_.block_table.has_value(); }
  // Multi-head latent attention whose latents are the keys and the values.
  bool absorbed() const;
  bool is_size(int64_t size, int64_t value_size) const;
  // Returns the tokens of the longest sequence of query; none if a length is symbolic.
  std::optional<int64_t> longest_query() const;
  NamedTensor query() const { return {"query", op_.query}; }

  const FusedInferAttentionScore& op_;
  const InferLayout& layout_;
  LayoutAxes axes_;
  DeviceLimits limits_;
  c10::SymInt batch_, queries_, keys_;  // tokens of one batch, in packed layouts of all sequences
  c10::SymInt key_heads_, head_size_, value_size_;
  c10::SymInt rope_size_ = 0;
  c10::SymInt page_size_ = 0;
};

}  // namespace ascend_attn
