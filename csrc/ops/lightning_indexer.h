// LightningIndexer, which scores every key for every query token and keeps the best sparse_count of
// them, and its gradient.
#pragma once

#include <array>
#include <tuple>
#include <vector>

#include "core/sequence_lengths.h"
#include "dispatch/arguments.h"
#include "ops/key_pages.h"

namespace ascend_attn {

class DeviceLimits;
class SparseRules;
struct OperatorLimits;

struct LightningIndexer {
  static constexpr const char* name = "lightning_indexer";
  static constexpr const char* schema =
      "(Tensor query, Tensor key, Tensor weights, *, Tensor? actual_seq_lengths_query=None, "
      "Tensor? actual_seq_lengths_key=None, str layout=\"BSND\", SymInt sparse_count=2048, "
      "int sparse_mode=3, int pre_tokens=9223372036854775807, "
      "int next_tokens=9223372036854775807, "
      "bool return_values=False, str? layout_key=None, Tensor? block_table=None, "
      "int cmp_ratio=1, Tensor? cmp_residual_key=None) -> "
      "(Tensor sparse_indices, Tensor sparse_values)";
  // The second one for compressed keys.
  static constexpr std::array functions{"aclnnLightningIndexer", "aclnnLightningIndexerV2"};
  static const OperatorLimits limits;
  using Outputs = std::tuple<at::Tensor, at::Tensor>;  // sparse_indices, sparse_values

  at::Tensor query, key, weights;
  DeviceLengths actual_seq_lengths_query, actual_seq_lengths_key;
  LayoutArgument layout;
  c10::SymInt sparse_count;
  int64_t sparse_mode, pre_tokens, next_tokens;
  bool return_values;
  KeyPages pages;
  int64_t cmp_ratio;
  std::optional<at::Tensor> cmp_residual_key;

  // Whether a key stands for several tokens.
  bool compressed() const { return cmp_ratio > 1; }
  Outputs check_and_allocate() const;
  void check_values() const;

  bool differentiable() const;
  void save(AutogradContext& context, const Outputs& outputs) const;
  static std::vector<at::Tensor> backward(AutogradContext& context,
                                          const std::vector<at::Tensor>& d_outputs);

 private:
  void check_compression(const SparseRules& rules) const;
};

struct LightningIndexerGrad {
  static constexpr const char* name = "lightning_indexer_grad";
  static constexpr const char* schema =
      "(Tensor query, Tensor key, Tensor d_values, Tensor sparse_indices, Tensor weights, *, "
      "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
      "str layout=\"BSND\", int sparse_mode=3, int pre_tokens=9223372036854775807, "
      "int next_tokens=9223372036854775807, bool deterministic=False) -> (Tensor d_query, "
      "Tensor d_key, Tensor d_weights)";
  static constexpr std::array functions{"aclnnLightningIndexerGrad"};
  static const OperatorLimits limits;
  using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // d_query, d_key, d_weights

  at::Tensor query, key, d_values, sparse_indices, weights;
  DeviceLengths actual_seq_lengths_query, actual_seq_lengths_key;
  LayoutArgument layout;
  int64_t sparse_mode, pre_tokens, next_tokens;
  bool deterministic;

  Outputs check_and_allocate() const;
  void check_values() const;
  // Checks what depends on the values of the lengths, where they can be read.
  void check_key_lengths(const std::vector<Sequence>& sequences) const;

 private:
  void check_key_count(const DeviceLimits& device_limits, int64_t keys) const;
};

}  // namespace ascend_attn
