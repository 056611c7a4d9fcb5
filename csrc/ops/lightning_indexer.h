// LightningIndexer and LightningIndexerGrad: scores every key for every query token and keeps the
// best sparse_count of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace ascend_attn {

struct LightningIndexer {
  static constexpr const char* name = "lightning_indexer";
  using Outputs = std::tuple<at::Tensor, at::Tensor>;  // sparse_indices, sparse_values
  using Signature = Outputs(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                            std::string_view, c10::SymInt, int64_t, int64_t, int64_t, bool);

  const at::Tensor& query;
  const at::Tensor& key;
  const at::Tensor& weights;
  const std::optional<at::Tensor>& actual_seq_lengths_query;
  const std::optional<at::Tensor>& actual_seq_lengths_key;
  std::string_view layout;
  c10::SymInt sparse_count;
  int64_t sparse_mode;
  int64_t pre_tokens;
  int64_t next_tokens;
  bool return_values;

  Outputs check_and_allocate() const;
};

struct LightningIndexerGrad {
  static constexpr const char* name = "lightning_indexer_grad";
  using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // d_query, d_key, d_weights
  using Signature = Outputs(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                            const std::optional<at::Tensor>&, std::string_view, int64_t, int64_t,
                            int64_t, bool);

  const at::Tensor& query;
  const at::Tensor& key;
  const at::Tensor& d_values;
  const at::Tensor& sparse_indices;
  const at::Tensor& weights;
  const std::optional<at::Tensor>& actual_seq_lengths_query;
  const std::optional<at::Tensor>& actual_seq_lengths_key;
  std::string_view layout;
  int64_t sparse_mode;
  int64_t pre_tokens;
  int64_t next_tokens;
  bool deterministic;

  Outputs check_and_allocate() const;
};

}  // namespace ascend_attn
