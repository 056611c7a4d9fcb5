// The slots of sparse_indices that the device's kernels read: min(K, what the token sees) of a row,
// whatever they hold. The rules here are those of the checked mode alone; the CPU accepts such
// rows.
#pragma once

#include <string_view>

#include "cpu/common/sparse_inputs.h"

namespace ascend_attn::cpu {

// Rejects -1 in a slot that is read, which the gradients' kernels take for an address.
void check_no_gaps(std::string_view op, const SparseInputs& inputs);
// Rejects an index of a single key behind a -1, which the kernel of SparseFlashAttention reads on
// A2 and A3.
void check_nothing_behind_gaps(std::string_view op, const SparseInputs& inputs);

}  // namespace ascend_attn::cpu
