// The slots of sparse_indices that the device's kernels read: min(K, what the token sees) of a row,
// whatever they hold. The rules here are those of the checked mode; the CPU accepts such rows.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "core/sequence_lengths.h"
#include "core/sparse_mode.h"
#include "ops/compressed_keys.h"
#include "ops/sparse_indices.h"

namespace ascend_attn::aclnn {

// The selection of a call, whose indices may be on a device.
struct Selection {
  const char* op;
  SparseMode mode;
  int64_t block_size;
  std::vector<Sequence> sequences;
  at::Tensor sparse_indices;  // with the axis of heads
  int64_t ratio = 1;          // tokens that a key stands for
  std::vector<int64_t> residuals = {};
};

// Rejects -1 in a slot that is read, which the gradients' kernels take for an address.
void check_no_gaps(const Selection& selection);
// Rejects an index of a single key behind a -1, which the kernel of SparseFlashAttention reads on
// A2 and A3.
void check_nothing_behind_gaps(const Selection& selection);

template <typename Op>
Selection selection_of(const Op& op) {
  const auto make = [&](const auto& options, int64_t block_size) -> Selection {
    const auto layout = options.layout.value();
    const auto& query_lengths = options.actual_seq_lengths_query;
    const auto& key_lengths = options.actual_seq_lengths_key;
    Selection selection{Op::name,
                        static_cast<SparseMode>(options.sparse_mode),
                        block_size,
                        {},
                        with_head_axis(op.sparse_indices, op.query)};
    if constexpr (requires { op.pages; }) {
      if (op.pages.given()) {
        selection.sequences = read_paged_sequences(
            Op::name, layout, op.query, op.key, *op.pages.block_table, query_lengths, key_lengths);
        return selection;
      }
    }
    selection.sequences =
        read_sequences(Op::name, layout, op.query, op.key, query_lengths, key_lengths);
    if constexpr (requires { op.cmp_residual_key; }) {
      selection.ratio = op.cmp_ratio;
      selection.residuals = read_residuals(Op::name, {"cmp_residual_key", op.cmp_residual_key},
                                           op.cmp_ratio, selection.mode, selection.sequences);
    }
    return selection;
  };
  if constexpr (requires { op.options; }) {
    return make(op.options, op.options.sparse_block_size);
  } else {
    return make(op, 1);
  }
}

template <typename Op>
void check_read_slots(const Op& op) {
  check_no_gaps(selection_of(op));
}

}  // namespace ascend_attn::aclnn
