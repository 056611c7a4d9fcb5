// Rows of a latent cache in int8, which become query's dtype as they are loaded.
//
// A row has the numbers, the rope in query's dtype, and a float32 scale for each tile of the
// numbers. Nothing in it is aligned.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cpu/common/key_rows.h"
#include "cpu/common/sparse_inputs.h"
#include "cpu/common/token_rows.h"
#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

// Returns the nearest number of float16; of two, the larger, as A2 and A3 round the keys.
inline float nearest_half(float x) {
  const float size = std::abs(x);
  const auto bits = std::bit_cast<uint32_t>(size);
  const float normal = std::bit_cast<float>((bits + 0x1000) & 0xffffe000u);
  // Below the smallest normal number, in steps of 2^-24.
  const float steps = size * 0x1p24f;
  const auto whole = static_cast<int32_t>(steps < 1024 ? steps : 1024);
  const float below = (steps - whole >= 0.5f ? whole + 1 : whole) * 0x1p-24f;
  float nearest = size < 0x1p-14f ? below : normal;
  nearest = nearest > 65504 ? std::numeric_limits<float>::infinity() : nearest;
  return x != x ? x : std::copysign(nearest, x);
}

// to = the product of integers and a scale, rounded to Input
template <typename Input, typename Operand>
void dequantize(const int8_t* from, float scale, Operand* to, int64_t count) {
  vectorized([=] {
    for (int64_t i = 0; i < count; ++i) {
      const float product = static_cast<float>(from[i]) * scale;
      if constexpr (std::is_same_v<Input, at::Half>) {
        to[i] = nearest_half(product);
      } else {
        to[i] = static_cast<Operand>(round_to<Input>(product));
      }
    }
  });
}

template <typename Input>
struct LatentRow {
  const int8_t* numbers;
  const int8_t* scales;
  int64_t tile;
};
// The rope, which lies before the scales, is fetched as well.
template <typename Input>
[[gnu::always_inline]] inline void prefetch(const LatentRow<Input>& row, int64_t /*width*/) {
  prefetch(row.numbers, row.scales - row.numbers + 1);
}
template <typename Operand, typename Input>
void load_row(const LatentRow<Input>& row, Operand* to, int64_t width) {
  const auto* scales = row.scales;
  for (int64_t begin = 0; begin < width; begin += row.tile) {
    float scale = 0;
    std::memcpy(&scale, scales, sizeof(scale));
    scales += sizeof(scale);
    dequantize<Input>(row.numbers + begin, scale, to + begin, std::min(row.tile, width - begin));
  }
}

template <typename Input>
struct RopeRow {
  const int8_t* bytes;
};
template <typename Input>
void prefetch(const RopeRow<Input>&, int64_t /*width*/) {}
template <typename Operand, typename Input>
void load_row(const RopeRow<Input>& row, Operand* to, int64_t width) {
  constexpr int64_t kMost = 64;
  std::array<Input, kMost> aligned;
  for (int64_t begin = 0; begin < width; begin += kMost) {
    const int64_t count = std::min(kMost, width - begin);
    constexpr int64_t kBytes = sizeof(Input);
    std::memcpy(aligned.data(), row.bytes + begin * kBytes, static_cast<size_t>(count * kBytes));
    load_row(aligned.data(), to + begin, count);
  }
}

// The numbers and scales of the rows of one sequence, and their ropes.
template <typename Input>
class LatentRows {
 public:
  LatentRows(const at::Tensor& keys, const BlockTable& table, const Sequence& sequence,
             const RowForm& form)
      : rows_(keys, table, sequence), form_(form) {}

  LatentRow<Input> row(int64_t key) const {
    const auto* numbers = rows_.row(key);
    return {numbers, numbers + form_.first_scale, form_.tile};
  }

 private:
  KeyRows<int8_t> rows_;
  RowForm form_;
};
template <typename Input>
class RopeRows {
 public:
  RopeRows(const at::Tensor& ropes, const BlockTable& table, const Sequence& sequence)
      : rows_(ropes, table, sequence) {}

  RopeRow<Input> row(int64_t key) const { return {rows_.row(key)}; }

 private:
  KeyRows<int8_t> rows_;
};

// The inputs of one sequence whose keys are such rows.
template <typename Input>
using PackedInputs = SequenceInputs<Input, LatentRows<Input>, RopeRows<Input>>;

}  // namespace ascend_attn::cpu
