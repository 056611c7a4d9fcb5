// SparseLightningIndexerKLLossGrad: the gradients of the KL loss that trains an indexer towards
// given probabilities, as DeepSeek-V4 does.
#pragma once

#include <array>
#include <tuple>
#include <vector>

#include "core/sequence_lengths.h"
#include "dispatch/arguments.h"

namespace ascend_attn {

struct OperatorLimits;
struct KLLossSelection;

struct SparseLightningIndexerKLLossGrad {
  static constexpr const char* name = "sparse_lightning_indexer_kl_loss_grad";
  static constexpr const char* schema =
      "(Tensor query_index, Tensor key_index, Tensor weights, Tensor sparse_indices, "
      "Tensor attn_softmax_l1_norm, *, Tensor? actual_seq_lengths_query=None, "
      "Tensor? actual_seq_lengths_key=None, Tensor? cmp_residual_key=None, "
      "str layout=\"BSND\", int sparse_mode=3, int cmp_ratio=1, bool deterministic=False) -> "
      "(Tensor d_query_index, Tensor d_key_index, Tensor d_weights, Tensor softmax_out)";
  static constexpr std::array functions{"aclnnSparseLightningIndexerKLLossGrad"};
  static const OperatorLimits limits;
  using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor,
                             at::Tensor>;  // d_query_index, d_key_index, d_weights, softmax_out

  at::Tensor query_index, key_index, weights, sparse_indices, attn_softmax_l1_norm;
  DeviceLengths actual_seq_lengths_query, actual_seq_lengths_key;
  std::optional<at::Tensor> cmp_residual_key;
  LayoutArgument layout;
  int64_t sparse_mode, cmp_ratio;
  bool deterministic;

  Outputs check_and_allocate() const;
  void check_values() const;
  // Checks what depends on the values of the lengths, where they can be read.
  void check_key_lengths(const std::vector<Sequence>& sequences) const;
  KLLossSelection selection() const;
};

// The selection of a call, by the names that the sparse operators share.
struct KLLossSelection {
  static constexpr const char* name = SparseLightningIndexerKLLossGrad::name;

  at::Tensor query, key, sparse_indices;
  DeviceLengths actual_seq_lengths_query, actual_seq_lengths_key;
  std::optional<at::Tensor> cmp_residual_key;
  LayoutArgument layout;
  int64_t sparse_mode, cmp_ratio;
};

}  // namespace ascend_attn
