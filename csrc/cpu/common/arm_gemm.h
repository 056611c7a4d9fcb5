// Products by the matrix instructions of ARM. A is row-major, B packed with pairs of rows
// (bfloat16) or fours of rows (int8) interleaved, as in tile_gemm.h.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

#include "cpu/common/portable_gemm.h"

namespace ascend_attn::cpu {

// Whether the processor has the instruction and may use it. Without it, do not call the product.
bool has_bfmmla();
bool has_usmmla();

void multiply_with_bfmmla(const MatrixProduct<at::BFloat16, at::BFloat16, float>& product);
void multiply_with_usmmla(const MatrixProduct<uint8_t, int8_t, int32_t>& product);

}  // namespace ascend_attn::cpu
