// The slots of sparse_indices that the device's gradient kernels read.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "core/sequence_lengths.h"
#include "core/sparse_mode.h"
#include "ops/sparse_indices.h"

namespace ascend_attn::aclnn {

// Checks that no slot which is read holds -1. The kernels read as many slots of a row as it sees
// keys or blocks, up to K, and take -1 for an address, where the CPU ends the row.
void check_read_slots(const char* op, SparseMode mode, int64_t block_size,
                      const std::vector<Sequence>& sequences, const at::Tensor& sparse_indices);

template <typename Op>
void check_read_slots(const Op& op) {
  const auto check = [&](const auto& options, int64_t block_size) {
    check_read_slots(
        Op::name, static_cast<SparseMode>(options.sparse_mode), block_size,
        read_sequences(Op::name, options.layout.value(), op.query, op.key,
                       options.actual_seq_lengths_query, options.actual_seq_lengths_key),
        with_head_axis(op.sparse_indices, op.query));
  };
  if constexpr (requires { op.options; }) {
    check(op.options, op.options.sparse_block_size);
  } else {
    check(op, 1);
  }
}

}  // namespace ascend_attn::aclnn
