// Makes what CANN's functions for compressed keys take, on the device and without waiting for it.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "core/layout.h"
#include "core/sparse_mode.h"

namespace ascend_attn::aclnn {

// Returns cumulative lengths with a leading 0.
at::Tensor cu_seqlens(const at::Tensor& ends);

// The tokens of the sequences of a tensor: `all` in each without lengths.
struct TokenCounts {
  std::optional<at::Tensor> lengths;
  bool cumulative;
  int64_t all;
};

// Returns tokens - keys * ratio of each sequence, on the device of `like`.
at::Tensor derived_residual(const TokenCounts& tokens, const TokenCounts& keys, int64_t ratio,
                            int64_t batch, const at::Tensor& like);

// Returns the residual that a call of the indexer, or of its loss, has or leaves out; none where
// every query sees all keys. `cumulative_keys`: whether the lengths of the keys are.
template <typename Op>
std::optional<at::Tensor> residual_of(const Op& op, bool cumulative_keys) {
  const auto mode = static_cast<SparseMode>(op.sparse_mode);
  if (op.cmp_ratio == 1 || mode != SparseMode::right_down_causal) {
    return std::nullopt;
  }
  if (op.cmp_residual_key) {
    return op.cmp_residual_key;
  }
  const bool packed = op.layout == Layout::TND;
  const auto batch = packed ? op.actual_seq_lengths_query->size(0) : op.query.size(0);
  return derived_residual({op.actual_seq_lengths_query, packed, op.query.size(-3)},
                          {op.actual_seq_lengths_key, cumulative_keys, op.key.size(-3)},
                          op.cmp_ratio, batch, op.query);
}

}  // namespace ascend_attn::aclnn
