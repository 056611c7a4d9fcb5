#include "cpu/common/portable_gemm.h"

#include <algorithm>

#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {
namespace {

// Computes `rows` rows and `columns` columns of C. Both are constants, and the inner loop is marked
// omp simd: compilers then hold all sums in vector registers.
template <int64_t rows, int64_t columns, int64_t bytes, typename T>
[[gnu::always_inline]] inline void multiply_block(const MatrixProduct<T>& p) {
  T sums[rows][columns] = {};
  for (int64_t l = 0; l < p.k; ++l) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < rows; ++i) {
      const T factor = p.a.row(i)[l];
#pragma omp simd
      for (int64_t j = 0; j < columns; ++j) {
        sums[i][j] = multiply_add<bytes>(factor, p.b.row(l)[j], sums[i][j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int64_t i = 0; i < rows; ++i) {
    T* out = p.c.row(i);
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) {
      out[j] = p.accumulate ? out[j] + sums[i][j] : sums[i][j];
    }
  }
}

// Computes `columns` columns of C: blocks of `rows` rows, then the remaining rows.
template <int64_t rows, int64_t columns, int64_t bytes, typename T>
[[gnu::always_inline]] inline void multiply_rows(MatrixProduct<T> p) {
  for (; p.m >= rows; p.m -= rows) {
    multiply_block<rows, columns, bytes>(p);
    p.a = p.a.from(rows);
    p.c = p.c.from(rows);
  }
  if constexpr (rows > 1) {
    multiply_rows<rows / 2, columns, bytes>(p);
  }
}

template <int64_t rows, int64_t columns, int64_t bytes, typename T>
[[gnu::always_inline]] inline void multiply_panel(MatrixProduct<T> p) {
  // Many rows of A share a copy of B that is adjacent in the L1 cache, whatever the stride of B is.
  // Few do not, but add the same parts, so that the bits of a row do not depend on how many there
  // are.
  constexpr int64_t depth = 128;
  alignas(64) T panel[depth * columns];
  const bool copies = p.m > 2 * rows && p.b.stride() != columns;
  auto part = p;
  for (int64_t first = 0; first == 0 || first < p.k; first += depth) {
    part.k = std::min(depth, p.k - first);
    part.a = p.a.from(0, first);
    part.b = p.b.from(first);
    if (copies) {
      for (int64_t l = 0; l < part.k; ++l) {
        std::copy_n(part.b.row(l), columns, panel + l * columns);
      }
      part.b = {panel, columns};
    }
    multiply_rows<rows, columns, bytes>(part);
    part.accumulate = true;
  }
}

template <int64_t rows, int64_t columns, int64_t bytes, typename T>
[[gnu::always_inline]] inline void multiply_columns(MatrixProduct<T> p) {
  for (; p.n >= columns; p.n -= columns) {
    multiply_panel<rows, columns, bytes>(p);
    p.b = p.b.from(0, columns);
    p.c = p.c.from(0, columns);
  }
  if constexpr (columns > 1) {
    multiply_columns<rows, columns / 2, bytes>(p);
  }
}

}  // namespace

template <typename T>
void multiply(const MatrixProduct<T>& product) {
  vectorized([product](auto bytes) {
#if defined(__aarch64__)
    constexpr bool has_32_registers = true;
#else
    constexpr bool has_32_registers = bytes == 64;
#endif
    // Sums fill half of the registers; factors and elements of B need the others.
    multiply_columns<has_32_registers ? 8 : 4, 2 * bytes / sizeof(T), bytes>(product);
  });
}

template void multiply(const MatrixProduct<float>&);
template void multiply(const MatrixProduct<double>&);

}  // namespace ascend_attn::cpu
