// Products of float or double matrices in portable C++, for where torch has none: brgemm requires
// AVX512, and multiplies no doubles.
#pragma once

#include <cstdint>

namespace ascend_attn::cpu {

// C (m, n) = A (m, k) * B (k, n), or C += A * B. Row-major, with the distance of rows as stride.
template <typename A, typename B = A, typename C = A>
struct Product {
  int64_t m, n, k;
  const A* a;
  int64_t a_stride;
  const B* b;
  int64_t b_stride;
  C* c;
  int64_t c_stride;
  bool accumulate;
};

template <typename T>
void multiply(const Product<T>& product);

}  // namespace ascend_attn::cpu
