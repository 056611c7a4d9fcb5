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

// Returns the number of tokens of each sequence: of `tokens` without lengths.
at::Tensor token_counts(const std::optional<at::Tensor>& lengths, bool cumulative, int64_t batch,
                        int64_t tokens, const at::Tensor& like);

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
  const auto& query_lengths = op.actual_seq_lengths_query;
  const auto& key_lengths = op.actual_seq_lengths_key;
  const int64_t queries = op.query.size(-3);
  if (!query_lengths && !key_lengths) {
    return token_counts({}, false, op.query.size(0), queries - op.key.size(-3) * op.cmp_ratio,
                        op.query);
  }
  const auto batch = packed ? query_lengths->size(0) : op.query.size(0);
  const auto of_queries = token_counts(query_lengths, packed, batch, queries, op.query);
  const auto of_keys = token_counts(key_lengths, cumulative_keys, batch, op.key.size(-3), op.query);
  return of_queries.sub(of_keys, op.cmp_ratio);
}

}  // namespace ascend_attn::aclnn
