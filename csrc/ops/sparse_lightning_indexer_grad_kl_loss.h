// SparseLightningIndexerGradKLLoss: the KL loss that trains the indexer, and its gradients.
#pragma once

#include <array>
#include <tuple>
#include <vector>

#include "dispatch/arguments.h"

namespace ascend_attn {

struct OperatorLimits;

struct SparseLightningIndexerGradKLLoss {
  static constexpr const char* name = "sparse_lightning_indexer_grad_kl_loss";
  static constexpr const char* schema =
      "(Tensor query, Tensor key, Tensor query_index, Tensor key_index, Tensor weights, "
      "Tensor sparse_indices, Tensor softmax_max, Tensor softmax_sum, *, float scale_value, "
      "Tensor? query_rope=None, Tensor? key_rope=None, "
      "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
      "str layout=\"BSND\", int sparse_mode=3, int pre_tokens=9223372036854775807, "
      "int next_tokens=9223372036854775807, "
      "bool deterministic=False, Tensor? token_weight=None) -> (Tensor d_query_index, "
      "Tensor d_key_index, Tensor d_weights, Tensor loss)";
  static constexpr std::array functions{"aclnnSparseLightningIndexerGradKLLoss"};
  static const OperatorLimits limits;
  using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor,
                             at::Tensor>;  // d_query_index, d_key_index, d_weights, loss

  at::Tensor query, key, query_index, key_index, weights, sparse_indices, softmax_max, softmax_sum;
  double scale_value;
  std::optional<at::Tensor> query_rope, key_rope;
  Lengths actual_seq_lengths_query, actual_seq_lengths_key;
  LayoutArgument layout;
  int64_t sparse_mode, pre_tokens, next_tokens;
  bool deterministic;
  std::optional<at::Tensor> token_weight;

  Outputs check_and_allocate() const;
  void check_values() const;

  std::vector<at::Tensor> operands() const;
  bool differentiable() const;
  // All but the loss.
  static constexpr std::array<size_t, 3> constant_outputs() { return {0, 1, 2}; }
  void save(AutogradContext& context, const Outputs& outputs) const;
  static std::vector<at::Tensor> backward(AutogradContext& context,
                                          const std::vector<at::Tensor>& d_outputs);
};

}  // namespace ascend_attn
