// sparse_indices as the device reads them: made there, without waiting for it.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/key_pages.h"
#include "ops/sparse_flash_attention.h"

namespace ascend_attn::aclnn {

// Returns the sequence of each row of a pack, by the ends of the sequences. Padding rows get the
// last one.
at::Tensor sequences_of_rows(const at::Tensor& ends, const at::Tensor& rows);

// Returns how many keys each row sees, beside the selection's axes of heads and slots:
// (B, S1, 1, 1) or (T1, 1, 1), where B and S1 may be 1. A row of no sequence sees any number. `key`
// is a cache if `paged`.
at::Tensor visible_keys_of_rows(const at::Tensor& query, const at::Tensor& key,
                                const SparseAttentionOptions& options, bool paged);

// Returns the selection with -1 in all slots behind the first -1 of a row.
at::Tensor ended_by_first_gap(const at::Tensor& selection);

// Returns the selection with the cut block of each row in the last slot that is read, as the kernel
// of the gradient wants it on A2 and A3; the other blocks keep their order. A block is cut where
// the keys that the row sees end within it.
at::Tensor with_cut_block_last(const at::Tensor& selection, const at::Tensor& query,
                               const at::Tensor& key, const SparseAttentionOptions& options);

}  // namespace ascend_attn::aclnn
