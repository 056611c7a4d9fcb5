// Products of one row with keys that are read in place. For the few rows of decoding, packing a
// block of keys as an operand of tile_gemm takes longer than the product.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

// One head reads so many keys before the next head does.
inline constexpr int64_t kKeysInPlace = 16;

// The rows that follow in memory's order, which are prefetched while others are used.
template <typename Rows>
struct NextRows {
  Rows rows;
  int64_t count;

  void prefetch_row(int64_t index, int64_t size) const {
    prefetch(rows.row(std::min(index, count - 1)), size);
  }
};
// Clang 16 deduces none of an aggregate.
template <typename Rows>
NextRows(Rows, int64_t) -> NextRows<Rows>;

// scores[j] = query . row j of `key`, for j < count.
template <typename T, typename Operand, typename Rows>
void score_rows(const Operand* query, int64_t size, const Rows& key, int64_t count,
                const NextRows<Rows>& next, T* scores) {
  vectorized([=] {
    for (int64_t j = 0; j < count; ++j) {
      next.prefetch_row(j, size);
      const auto* row = key.row(j);
      scores[j] = sum_of<T>(
          size, [=](int64_t i) { return static_cast<T>(query[i]) * static_cast<T>(row[i]); });
    }
  });
}

// out += the sum of weights[j] * row j of `value`, for j < count.
template <typename T, typename Operand, typename Rows>
void add_rows(const Operand* weights, int64_t size, const Rows& value, int64_t count,
              const NextRows<Rows>& next, T* out) {
  constexpr int64_t step = 4;
  vectorized([=] {
    int64_t j = 0;
    for (; j + step <= count; j += step) {
      for (int64_t k = 0; k < step; ++k) {
        next.prefetch_row(j + k, size);
      }
      for (int64_t i = 0; i < size; ++i) {
        T sum = 0;
        for (int64_t k = 0; k < step; ++k) {
          sum += static_cast<T>(weights[j + k]) * static_cast<T>(value.row(j + k)[i]);
        }
        out[i] += sum;
      }
    }
    for (; j < count; ++j) {
      for (int64_t i = 0; i < size; ++i) {
        out[i] += static_cast<T>(weights[j]) * static_cast<T>(value.row(j)[i]);
      }
    }
  });
}

}  // namespace ascend_attn::cpu
