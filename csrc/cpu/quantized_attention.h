// Attention of int8 tensors, with the order of roundings that the device has.
#pragma once

#include <ATen/core/Tensor.h>

#include "cpu/dense_attention.h"

namespace ascend_attn::cpu {

// What makes integers of real numbers, and the other way round.
struct Quantization {
  float deq_scale1;    // of query * key
  float quant_scale1;  // of the exponentials
  float deq_scale2;    // of exponentials * value
  // Of an int8 output: float, one value or one per channel head * D + d. Undefined if absent.
  at::Tensor quant_scale2;
  at::Tensor quant_offset2;
};

// Fills the rows of all sequences of `out`, half or int8, which is by head.
void quantized_attention(const DenseAttention& attention, const Quantization& quantization,
                         const at::Tensor& out);

}  // namespace ascend_attn::cpu
