// SparseFlashAttention and SparseFlashAttentionGrad: attention of every query token over the keys
// that sparse_indices selects, in the absorbed form of multi-head latent attention.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace ascend_attn {

struct SparseFlashAttention {
  static constexpr const char* name = "sparse_flash_attention";
  using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // out, softmax_max, softmax_sum
  using Signature = Outputs(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, double, const std::optional<at::Tensor>&,
                            const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                            const std::optional<at::Tensor>&, int64_t, std::string_view, int64_t,
                            int64_t, int64_t, bool);

  const at::Tensor& query;
  const at::Tensor& key;
  const at::Tensor& value;
  const at::Tensor& sparse_indices;
  double scale_value;
  const std::optional<at::Tensor>& actual_seq_lengths_query;
  const std::optional<at::Tensor>& actual_seq_lengths_key;
  const std::optional<at::Tensor>& query_rope;
  const std::optional<at::Tensor>& key_rope;
  int64_t sparse_block_size;
  std::string_view layout;
  int64_t sparse_mode;
  int64_t pre_tokens;
  int64_t next_tokens;
  bool deterministic;

  Outputs check_and_allocate() const;
};

struct SparseFlashAttentionGrad {
  static constexpr const char* name = "sparse_flash_attention_grad";
  // d_query, d_key, d_value, d_query_rope, d_key_rope
  using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
  using Signature = Outputs(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, const at::Tensor&, double,
                            const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                            const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                            int64_t, std::string_view, int64_t, int64_t, int64_t, bool);

  const at::Tensor& query;
  const at::Tensor& key;
  const at::Tensor& value;
  const at::Tensor& sparse_indices;
  const at::Tensor& d_out;
  const at::Tensor& out;
  const at::Tensor& softmax_max;
  const at::Tensor& softmax_sum;
  double scale_value;
  const std::optional<at::Tensor>& actual_seq_lengths_query;
  const std::optional<at::Tensor>& actual_seq_lengths_key;
  const std::optional<at::Tensor>& query_rope;
  const std::optional<at::Tensor>& key_rope;
  int64_t sparse_block_size;
  std::string_view layout;
  int64_t sparse_mode;
  int64_t pre_tokens;
  int64_t next_tokens;
  bool deterministic;

  Outputs check_and_allocate() const;
};

}  // namespace ascend_attn
