// The compressed masks of the sparse_modes, which do not depend on a call.
#pragma once

#include <ATen/core/Tensor.h>

#include "core/sparse_mode.h"

namespace ascend_attn::aclnn {

// Returns the mask that a mode reads, on the device of `options`, where True masks a key out. It is
// made once for each device; a capture without an earlier call makes one of its own.
at::Tensor compressed_mask(const char* op, SparseMode mode, const at::TensorOptions& options);

}  // namespace ascend_attn::aclnn
