// Attention to some of the keys of a token, to be merged with that to its other keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cpu/common/tile_gemm.h"
#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

// `out` is not yet divided by `sum`. Without keys, the pointers may be null.
template <typename T>
struct Partial {
  int64_t keys;
  T* out;  // (heads, D)
  T* max;  // (heads)
  T* sum;  // (heads)
};

template <typename T>
class Partials {
 public:
  Partials(int64_t count, int64_t heads, int64_t size)
      : heads_(heads), out_(count * heads, size), statistics_(2 * count, heads) {}

  Partial<T> operator[](int64_t index) const {
    return {0, out_.row(index * heads_), statistics_.row(2 * index),
            statistics_.row(2 * index + 1)};
  }

 private:
  int64_t heads_;
  Tile<T> out_;
  Tile<T> statistics_;
};

// Merges heads [begin, end) of `next` into `merged`. Both have keys.
template <typename T>
void merge(const Partial<T>& merged, const Partial<T>& next, int64_t begin, int64_t end,
           int64_t size) {
  for (int64_t h = begin; h < end; ++h) {
    const T max = std::max(merged.max[h], next.max[h]);
    const T factor = exponential(merged.max[h] - max);
    const T next_factor = exponential(next.max[h] - max);
    merged.max[h] = max;
    merged.sum[h] = factor * merged.sum[h] + next_factor * next.sum[h];
    vectorized([=, out = merged.out + h * size, next = next.out + h * size] {
      for (int64_t i = 0; i < size; ++i) {
        out[i] = factor * out[i] + next_factor * next[i];
      }
    });
  }
}

// The outputs of one token: out (heads, D), and unless they are null softmax_max and softmax_sum
// (heads).
template <typename Input, typename T>
struct TokenOutputs {
  Input* out;
  T* softmax_max;
  T* softmax_sum;

  void store(const Partial<T>& from, int64_t begin, int64_t end, int64_t size) const {
    for (int64_t h = begin; h < end; ++h) {
      T max = 0;
      T sum = 0;
      if (from.keys > 0) {
        // Where every score is -inf, the softmax is none.
        const bool none = from.sum[h] == 0;
        max = none ? -std::numeric_limits<T>::infinity() : from.max[h];
        sum = none ? std::numeric_limits<T>::quiet_NaN() : from.sum[h];
        scale(from.out + h * size, T(1) / sum, out + h * size, size);
      } else {
        std::fill_n(out + h * size, size, Input(0));
      }
      if (softmax_max) {
        softmax_max[h] = max;
        softmax_sum[h] = sum;
      }
    }
  }
};

}  // namespace ascend_attn::cpu
