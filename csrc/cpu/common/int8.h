// int8 on either side of PromptFlashAttention.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <optional>

#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

// The factors between the products of int8 inputs.
struct Int8Scales {
  float deq_scale1;    // scores = deq_scale1 * (q * k)
  float quant_scale1;  // probabilities in int8 = quant_scale1 * exp(score - max)
  float deq_scale2;    // outputs = deq_scale2 * (those * v), and contains 1 / quant_scale1
};

// A scale of one value: float32, or uint64, whose low half is a float32 of 19 bits.
inline float read_scale(const at::Tensor& scale) {
  if (scale.scalar_type() == at::kUInt64) {
    const auto bits = static_cast<uint32_t>(*scale.const_data_ptr<uint64_t>());
    return std::bit_cast<float>(bits & 0xFFFFE000u);
  }
  return *scale.const_data_ptr<float>();
}

// round_half_even, and what int8 does not hold becomes its nearest value.
inline int8_t to_int8(float x) {
  const float rounded = std::rint(x);
  return static_cast<int8_t>(rounded >= 127 ? 127.0f : rounded >= -128 ? rounded : -128.0f);
}

// The int8 form of an output, to_int8(half(x) * quant_scale2 + quant_offset2).
class OutputQuantization {
 public:
  // Of `channels` = N * D, each with a scale of its own or all with the same.
  OutputQuantization(const at::Tensor& scale, const std::optional<at::Tensor>& offset,
                     int64_t channels)
      : scale_(per_channel(scale, channels)),
        offset_(offset ? per_channel(*offset, channels) : at::zeros({channels}, at::kFloat)) {}

  // to = the int8 form of factor * from, the output of one head of `size` channels.
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
