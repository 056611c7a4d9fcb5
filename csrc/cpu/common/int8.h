// int8 inputs and outputs of PromptFlashAttention.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <optional>

#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

// Scale factors for the integer products of int8 inputs.
struct Int8Scales {
  float deq_scale1;    // scores = deq_scale1 * (q * k)
  float quant_scale1;  // probabilities in int8 = quant_scale1 * exp(score - max)
  float deq_scale2;    // outputs = deq_scale2 * (those * v); includes 1 / quant_scale1
};

// Reads a scalar scale: float32, or uint64, whose low half is a float32 of which the upper 19 bits
// count.
inline float read_scale(const at::Tensor& scale) {
  if (scale.scalar_type() == at::kUInt64) {
    const auto bits = static_cast<uint32_t>(*scale.const_data_ptr<uint64_t>());
    return std::bit_cast<float>(bits & 0xFFFFE000u);
  }
  return *scale.const_data_ptr<float>();
}

// Rounds half to even and saturates.
inline int8_t to_int8(float x) {
  const float rounded = std::rint(x);
  return static_cast<int8_t>(rounded >= 127 ? 127.0f : rounded >= -128 ? rounded : -128.0f);
}

// Quantises an output: to_int8(half(x) * quant_scale2 + quant_offset2).
class OutputQuantization {
 public:
  // Each of the `channels` = N * D has a scale of its own, or all share one.
  OutputQuantization(const at::Tensor& scale, const std::optional<at::Tensor>& offset,
                     int64_t channels)
      : scale_(per_channel(scale, channels)),
        offset_(offset ? per_channel(*offset, channels) : at::zeros({channels}, at::kFloat)) {}

  // Writes factor * from, the output of one head of `size` channels, to `to` in int8.
  template <typename T>
  void store(const T* from, T factor, int64_t head, int64_t size, int8_t* to) const {
    vectorized([=, scale = scale_.const_data_ptr<float>() + head * size,
                offset = offset_.const_data_ptr<float>() + head * size] {
      for (int64_t i = 0; i < size; ++i) {
        const auto rounded = static_cast<at::Half>(static_cast<float>(factor * from[i]));
        to[i] = to_int8(static_cast<float>(rounded) * scale[i] + offset[i]);
      }
    });
  }

 private:
  static at::Tensor per_channel(const at::Tensor& values, int64_t channels) {
    return values.to(at::kFloat).reshape({-1}).expand({channels}).contiguous();
  }

  at::Tensor scale_;
  at::Tensor offset_;
};

}  // namespace ascend_attn::cpu
