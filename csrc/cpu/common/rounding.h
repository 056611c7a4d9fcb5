// Probabilities and their gradients are operands of a second product. Rounding them to 16 bits is
// what the device does; over few keys it would be the largest error by far. A row over few keys
// carries what rounding lost in a second operand.
#pragma once

#include <cstdint>

#include "cpu/common/tile_gemm.h"

namespace ascend_attn::cpu {

// Where an operator does not say how many are few.
inline constexpr int64_t kFewKeys = 128;

template <typename Operand>
constexpr bool carries_remainders(int64_t keys, int64_t few = kFewKeys) {
  return depth_step<Operand> > 1 && keys <= few;
}

// Writes the operand nearest to `value`, and what that lost, if operands are 16 bits wide.
template <typename T, typename Operand>
inline void store_rounded(T value, Operand& operand, Operand& remainder) {
  operand = static_cast<Operand>(value);
  if constexpr (depth_step<Operand> > 1) {
    remainder = static_cast<Operand>(value - static_cast<T>(operand));
  }
}

}  // namespace ascend_attn::cpu
