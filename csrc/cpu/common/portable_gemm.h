// Products of float or double matrices in portable C++, for where torch has none: brgemm requires
// AVX512, and multiplies no doubles.
#pragma once

#include <cstdint>

namespace ascend_attn::cpu {

// A row-major matrix in somebody else's memory, with the distance of rows as stride.
template <typename T>
class Matrix {
 public:
  Matrix() = default;
  Matrix(T* data, int64_t stride) : data_(data), stride_(stride) {}
  operator Matrix<const T>() const { return {data_, stride_}; }

  T* data() const { return data_; }
  int64_t stride() const { return stride_; }
  T* row(int64_t index) const { return data_ + index * stride_; }
  // Returns what begins at this element.
  Matrix from(int64_t row, int64_t column = 0) const { return {this->row(row) + column, stride_}; }

 private:
  T* data_ = nullptr;
  int64_t stride_ = 0;
};

// C (m, n) = A (m, k) * B (k, n), or C += A * B.
template <typename A, typename B = A, typename C = A>
struct MatrixProduct {
  int64_t m, n, k;
  Matrix<const A> a;
  Matrix<const B> b;
  Matrix<C> c;
  bool accumulate;
};

template <typename T>
void multiply(const MatrixProduct<T>& product);

}  // namespace ascend_attn::cpu
