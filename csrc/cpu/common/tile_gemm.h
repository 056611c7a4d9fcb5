// Products of small matrices, C = A * B or C += A * B. Each thread computes its own. All matrices
// are row-major.
//
// Kernels are written for three types:
//   Input        of the tensors: at::Half, at::BFloat16, float or double
//   Operand      of A and B: bfloat16 where has_bfloat16_products(), otherwise float; or double
//   Accumulator  of C: float, or double
// 8-bit integer products have an unsigned A, a signed B and an exact int32 C.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/common/portable_gemm.h"
#include "cpu/common/transposition.h"
#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

template <typename Operand>
using Accumulator = std::conditional_t<std::is_same_v<Operand, double>, double, float>;

constexpr int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// 16-bit products take B with pairs of rows interleaved, (K / 2, N, 2), so the depth K must be
// even. 8-bit products interleave four rows, (K / 4, N, 4).
template <typename Operand>
inline constexpr int64_t depth_step = sizeof(Operand) < 4 ? 4 / sizeof(Operand) : 1;

// The elements of a new tile. Unset is for those that are all written before they are read: a call
// of decoding is so short that zeroing them shows.
enum class TileContent { zeros, unset };

// Scratch memory of one thread: a row-major matrix, or an operand B of as many elements. Rows are
// aligned for vector loads if `columns` is a multiple of 32.
template <typename T>
class Tile : public Matrix<T> {
 public:
  Tile() = default;
  Tile(int64_t rows, int64_t columns, TileContent content = TileContent::zeros)
      : Tile(allocate(rows * columns, content), columns) {}

 private:
  Tile(at::DataPtr memory, int64_t stride)
      : Matrix<T>(static_cast<T*>(memory.get()), stride), memory_(std::move(memory)) {}

  static at::DataPtr allocate(int64_t count, TileContent content) {
    const auto bytes = static_cast<size_t>(count) * sizeof(T);
    auto memory = c10::GetCPUAllocator()->allocate(bytes);
    if (memory && content == TileContent::zeros) {
      std::memset(memory.get(), 0, bytes);
    }
    return memory;
  }

  at::DataPtr memory_;
};

// Returns whether bfloat16 matrices are multiplied as they are: where the processor can, which is
// tested once by multiplying two, and where that is chosen (matrix_products.h).
bool has_bfloat16_products();
// Returns whether 8-bit integers are multiplied as they are, rather than as floats.
bool has_int8_products();

// C (m, n) = A (m, k) * B (k, n), or C += A * B. B is packed by pack_rows or pack_transposed, and k
// is a multiple of depth_step. Code is generated for every new combination of sizes and strides, so
// keep their number small.
void tile_gemm(const MatrixProduct<at::BFloat16, at::BFloat16, float>& product);
void tile_gemm(const MatrixProduct<float>& product);
void tile_gemm(const MatrixProduct<double>& product);
void tile_gemm(const MatrixProduct<uint8_t, int8_t, int32_t>& product);

// Must be in scope on every thread that calls tile_gemm with 8- or 16-bit operands: tile registers
// are configured per thread and must be released.
class TileGemmScope {
 public:
  TileGemmScope() = default;
  ~TileGemmScope();
  TileGemmScope(const TileGemmScope&) = delete;
  TileGemmScope& operator=(const TileGemmScope&) = delete;
};

// The bits of an operand: compilers do not vectorise copies of the objects.
inline uint16_t& bits_of(at::BFloat16& operand) { return operand.x; }
inline uint16_t bits_of(const at::BFloat16& operand) { return operand.x; }
inline int8_t& bits_of(int8_t& operand) { return operand; }
inline int8_t bits_of(const int8_t& operand) { return operand; }

// B (k, n) = rows (k, n). `packed` has room for round_up(k, depth_step) * n elements.
template <typename T>
void pack_rows(int64_t k, int64_t n, std::type_identity_t<Matrix<const T>> rows, T* packed) {
  constexpr int64_t step = depth_step<T>;
  static_assert(step > 1);
  vectorized([=, stride = rows.stride()] {
    const int64_t whole = k / step * step;
    for (int64_t i = 0; i < whole; i += step) {
      const T* from = rows.row(i);
      T* to = packed + i * n;
      for (int64_t j = 0; j < n; ++j) {
        for (int64_t l = 0; l < step; ++l) {
          bits_of(to[step * j + l]) = bits_of(from[l * stride + j]);
        }
      }
    }
    for (int64_t j = 0; whole < k && j < n; ++j) {
      for (int64_t l = 0; l < step; ++l) {
        bits_of(packed[whole * n + step * j + l]) =
            whole + l < k ? bits_of(rows.row(whole + l)[j]) : 0;
      }
    }
  });
}

// to (columns, rows) = transpose of from (rows, columns)
template <typename T>
void transpose(const std::type_identity_t<Matrix<const T>>& from, int64_t rows, int64_t columns,
               const Matrix<T>& to) {
  constexpr int64_t size = sizeof(T);
  transpose_bytes<BitsOf<size>>(rows, columns, from.data(), from.stride() * size, to.data(),
                                to.stride() * size);
}

// B (k, n) = transpose of rows (n, k), k a multiple of depth_step. `packed` has room for k * n
// elements.
template <typename T>
void pack_transposed(int64_t k, int64_t n, std::type_identity_t<Matrix<const T>> rows, T* packed) {
  // The elements of a row of `rows` that are adjacent in B.
  constexpr int64_t step = depth_step<T>;
  constexpr int64_t size = sizeof(T);
  transpose_bytes<BitsOf<step * size>>(n, k / step, rows.data(), rows.stride() * size, packed,
                                       n * step * size);
}

// Returns B (k, n) = rows (k, n): `rows` itself if no packing is needed, otherwise `packed`.
template <typename T>
Matrix<const T> operand_b(int64_t k, int64_t n, std::type_identity_t<Matrix<const T>> rows,
                          const Tile<T>& packed) {
  if constexpr (depth_step<T> == 1) {
    return rows;
  } else {
    pack_rows(k, n, rows, packed.data());
    return {packed.data(), n};
  }
}

// The implementation that is used on this machine, in words, of each of `kind`: "vector loops", and
// the products of each type.
struct Implementation {
  const char* kind;
  std::string text;
};
std::vector<Implementation> implementations();

// Calls function.template operator()<Input, Operand>() for tensors of `dtype`.
template <typename Function>
void dispatch_operand(at::ScalarType dtype, Function&& function) {
  switch (dtype) {
    case at::kBFloat16:
      return has_bfloat16_products() ? function.template operator()<at::BFloat16, at::BFloat16>()
                                     : function.template operator()<at::BFloat16, float>();
    case at::kHalf:
      return function.template operator()<at::Half, float>();
    case at::kDouble:
      return function.template operator()<double, double>();
    default:
      return function.template operator()<float, float>();
  }
}

}  // namespace ascend_attn::cpu
