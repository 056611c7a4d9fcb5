// Checks the values of the softmax statistics that a call is given.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>

#include "core/error.h"
#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

// Returns whether a row may have this maximum and this sum. The maximum's own exponential is 1, so
// only a row without keys has a smaller sum, which is 0. Other processors may round 1 down a
// little. If a score is NaN, so is the maximum or the sum, and then every result.
template <typename T>
bool is_row_of_softmax(T max, T sum) {
  constexpr T largest = std::numeric_limits<T>::max();
  constexpr T least = T(0.99);
  const bool is_sum = (sum >= least && sum <= largest) || sum == 0;
  return (is_sum && std::abs(max) <= largest) || sum != sum || max != max;
}

// Rejects the statistics of `count` rows, `stride` elements apart, that no softmax has.
template <typename T>
void check_statistics(std::string_view op, const T* max, const T* sum, int64_t count,
                      int64_t stride = 1) {
  int32_t wrong = 0;
  vectorized([=, &wrong] {
    int32_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
      found |= !is_row_of_softmax(max[i * stride], sum[i * stride]);
    }
    wrong = found;
  });
  if (wrong == 0) [[likely]] {
    return;
  }
  int64_t i = 0;
  while (is_row_of_softmax(max[i], sum[i])) {
    i += stride;
  }
  check_value(is_row_of_softmax(T(0), sum[i]), op, "softmax_sum",
              "expected sums of exp(score - softmax_max), at least 1, or 0 without keys, got ",
              sum[i], "; softmax_max comes before softmax_sum");
  check_value(false, op, "softmax_max", "expected finite maxima, got ", max[i]);
}

// Rejects those of the first `count` rows of contiguous tensors.
inline void check_statistics(std::string_view op, const at::Tensor& max, const at::Tensor& sum,
                             int64_t count, int64_t stride = 1) {
  if (max.scalar_type() == at::kDouble) {
    check_statistics(op, max.const_data_ptr<double>(), sum.const_data_ptr<double>(), count, stride);
  } else {
    check_statistics(op, max.const_data_ptr<float>(), sum.const_data_ptr<float>(), count, stride);
  }
}

}  // namespace ascend_attn::cpu
