// The compressed masks that this library made: their values need no check in each call.
#pragma once

#include <ATen/core/Tensor.h>

namespace ascend_attn::cpu {

// Remembers a mask with the right values, in place of one of the same shape.
void remember_compressed_mask(const at::Tensor& mask);

// Returns whether this is a mask that was remembered, and that no operation has written to since.
bool is_known_mask(const at::Tensor& mask);

}  // namespace ascend_attn::cpu
