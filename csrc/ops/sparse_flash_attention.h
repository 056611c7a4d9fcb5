// SparseFlashAttention and SparseFlashAttentionGrad: attention of each query token over the keys
// that sparse_indices selects, in the absorbed form of multi-head latent attention.
#pragma once

#include <array>
#include <tuple>
#include <vector>

#include "dispatch/arguments.h"
#include "ops/key_pages.h"

namespace ascend_attn {

struct OperatorLimits;

// Keyword arguments shared by both operators.
struct SparseAttentionOptions {
  static constexpr bool is_argument_group = true;

  double scale_value;
  DeviceLengths actual_seq_lengths_query, actual_seq_lengths_key;
  std::optional<at::Tensor> query_rope, key_rope;
  int64_t sparse_block_size;
  LayoutArgument layout;
  int64_t sparse_mode, pre_tokens, next_tokens;
  bool deterministic;
};

struct SparseFlashAttention {
  static constexpr const char* name = "sparse_flash_attention";
  static constexpr const char* schema =
      "(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, *, float scale_value, "
      "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
      "Tensor? query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, "
      "str layout=\"BSND\", int sparse_mode=3, int pre_tokens=9223372036854775807, "
      "int next_tokens=9223372036854775807, bool deterministic=False, str? layout_kv=None, "
      "Tensor? block_table=None, bool return_softmax_lse=True) -> (Tensor out, "
      "Tensor softmax_max, Tensor softmax_sum)";
  static constexpr std::array functions{"aclnnSparseFlashAttention"};
  static const OperatorLimits limits;
  using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // out, softmax_max, softmax_sum

  at::Tensor query, key, value, sparse_indices;
  SparseAttentionOptions options;
  KeyPages pages;
  bool return_softmax_lse;

  Outputs check_and_allocate() const;
  void check_values() const;

  bool differentiable() const;
  // As in FlashAttentionScore.
  static constexpr std::array<size_t, 1> constant_outputs() { return {1}; }
  void save(AutogradContext& context, const Outputs& outputs) const;
  static std::vector<at::Tensor> backward(AutogradContext& context,
                                          const std::vector<at::Tensor>& d_outputs);
};

struct SparseFlashAttentionGrad {
  static constexpr const char* name = "sparse_flash_attention_grad";
  static constexpr const char* schema =
      "(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, Tensor? d_out, "
      "Tensor out, Tensor softmax_max, Tensor softmax_sum, *, float scale_value, "
      "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
      "Tensor? query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, "
      "str layout=\"BSND\", int sparse_mode=3, int pre_tokens=2147483647, "
      "int next_tokens=2147483647, bool deterministic=False, Tensor? d_softmax_sum=None) -> "
      "(Tensor d_query, "
      "Tensor d_key, Tensor d_value, Tensor d_query_rope, Tensor d_key_rope)";
  static constexpr std::array functions{"aclnnSparseFlashAttentionGrad"};
  static const OperatorLimits limits;
  using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                             at::Tensor>;  // d_query, d_key, d_value, d_query_rope, d_key_rope

  at::Tensor query, key, value, sparse_indices;
  std::optional<at::Tensor> d_out;
  at::Tensor out, softmax_max, softmax_sum;
  SparseAttentionOptions options;
  std::optional<at::Tensor> d_softmax_sum;

  Outputs check_and_allocate() const;
  void check_values() const;
};

}  // namespace ascend_attn
