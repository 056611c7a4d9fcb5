// Probabilities and their gradients are operands of a second product. The device rounds them to 16
// bits, and so do kernels with 16-bit operands. Over few keys that would be by far the largest
// error, so such rows carry the rounding errors in a second operand.
#pragma once

#include <cstdint>

#include "cpu/common/tile_gemm.h"

namespace ascend_attn::cpu {

// The default for operators that do not set their own.
inline constexpr int64_t kFewKeys = 128;

template <typename Operand>
constexpr bool carries_remainders(int64_t keys, int64_t few = kFewKeys) {
  return depth_step<Operand> > 1 && keys <= few;
}

// Rounds `value` to an operand, and stores the rounding error if operands are 16 bits wide.
template <typename T, typename Operand>
inline void store_rounded(T value, Operand& operand, Operand& remainder) {
  operand = static_cast<Operand>(value);
  if constexpr (depth_step<Operand> > 1) {
    remainder = static_cast<Operand>(value - static_cast<T>(operand));
  }
}

}  // namespace ascend_attn::cpu
