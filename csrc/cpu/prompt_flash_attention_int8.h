// PromptFlashAttention for int8 query, key and value.
#pragma once

#include <ATen/core/Tensor.h>

#include "cpu/common/dense_attention.h"
#include "cpu/common/int8.h"

namespace ascend_attn::cpu {

// Writes the rows of every sequence to `out`, a strided (B, N, Sq, D): half, or int8 if
// `quantization` is given. Rows without keys are zero, in int8 too (not the offset).
void quantized_attention(const DenseAttention& attention, const Int8Scales& scales,
                         const std::optional<OutputQuantization>& quantization,
                         const at::Tensor& out);

}  // namespace ascend_attn::cpu
