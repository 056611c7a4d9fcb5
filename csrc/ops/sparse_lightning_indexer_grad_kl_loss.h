// SparseLightningIndexerGradKLLoss: the KL loss that trains the indexer, and its gradients.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/OptionalArrayRef.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace ascend_attn {

struct SparseLightningIndexerGradKLLoss {
  static constexpr const char* name = "sparse_lightning_indexer_grad_kl_loss";
  // d_query_index, d_key_index, d_weights, loss
  using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
  using Signature = Outputs(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, const at::Tensor&, double,
                            const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                            at::OptionalSymIntArrayRef, at::OptionalSymIntArrayRef,
                            std::string_view, int64_t, int64_t, int64_t, bool);

  const at::Tensor& query;
  const at::Tensor& key;
  const at::Tensor& query_index;
  const at::Tensor& key_index;
  const at::Tensor& weights;
  const at::Tensor& sparse_indices;
  const at::Tensor& softmax_max;
  const at::Tensor& softmax_sum;
  double scale_value;
  const std::optional<at::Tensor>& query_rope;
  const std::optional<at::Tensor>& key_rope;
  at::OptionalSymIntArrayRef actual_seq_lengths_query;
  at::OptionalSymIntArrayRef actual_seq_lengths_key;
  std::string_view layout;
  int64_t sparse_mode;
  int64_t pre_tokens;
  int64_t next_tokens;
  bool deterministic;

  Outputs check_and_allocate() const;
};

}  // namespace ascend_attn
