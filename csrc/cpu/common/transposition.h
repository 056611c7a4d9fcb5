// Transposes matrices of elements of 2, 4 or 8 bytes.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

// The unsigned integer of `bytes` bytes.
template <int64_t bytes>
using BitsOf =
    std::conditional_t<bytes == 2, uint16_t, std::conditional_t<bytes == 4, uint32_t, uint64_t>>;

// Rows and columns of a block, whose rows fill one cache line.
template <typename Element>
inline constexpr int64_t transposed_block = 64 / sizeof(Element);

// Interleaving the rows of the upper half with those of the lower half moves the leading bit of an
// element's position to its end. After log2(n) times, rows have become columns.
template <typename Element>
[[gnu::always_inline]] inline void transpose_block(const char* from, int64_t from_stride, char* to,
                                                   int64_t to_stride) {
  constexpr int64_t n = transposed_block<Element>;
  alignas(64) Element blocks[2][n * n];
  int64_t current = 0;
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(blocks[current] + i * n, from + i * from_stride, 64);
  }
  for (int64_t step = 1; step < n; step *= 2) {
    const Element* upper = blocks[current];
    const Element* lower = upper + n * n / 2;
    current = 1 - current;
    Element* interleaved = blocks[current];
#pragma omp simd
    for (int64_t i = 0; i < n * n / 2; ++i) {
      interleaved[2 * i] = upper[i];
      interleaved[2 * i + 1] = lower[i];
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(to + i * to_stride, blocks[current] + i * n, 64);
  }
}

// Transposes `from` (rows, columns) into `to` (columns, rows). Strides are in bytes.
template <typename Element>
void transpose_bytes(int64_t rows, int64_t columns, const void* from, int64_t from_stride, void* to,
                     int64_t to_stride) {
  vectorized([=, from = static_cast<const char*>(from), to = static_cast<char*>(to)] {
    constexpr int64_t n = transposed_block<Element>;
    constexpr int64_t size = sizeof(Element);
    const auto copy = [=](int64_t row, int64_t column) {
      std::memcpy(to + column * to_stride + row * size, from + row * from_stride + column * size,
                  size);
    };
    const int64_t whole_rows = rows / n * n;
    const int64_t whole_columns = columns / n * n;
    for (int64_t row = 0; row < whole_rows; row += n) {
      for (int64_t column = 0; column < whole_columns; column += n) {
        transpose_block<Element>(from + row * from_stride + column * size, from_stride,
                                 to + column * to_stride + row * size, to_stride);
      }
      for (int64_t column = whole_columns; column < columns; ++column) {
        for (int64_t i = row; i < row + n; ++i) {
          copy(i, column);
        }
      }
    }
    for (int64_t column = 0; column < columns; ++column) {
      for (int64_t row = whole_rows; row < rows; ++row) {
        copy(row, column);
      }
    }
  });
}

}  // namespace ascend_attn::cpu
