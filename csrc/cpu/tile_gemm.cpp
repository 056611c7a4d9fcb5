#include "cpu/tile_gemm.h"

#include <ATen/native/CPUBlas.h>

#include <array>

namespace ascend_attn::cpu {
namespace {

bool multiply_bfloat16() {
  constexpr int64_t size = 16;
  std::array<at::BFloat16, size * size> a;
  std::array<at::BFloat16, size * size> b;
  std::array<at::BFloat16, size * size> packed;
  for (int64_t i = 0; i < size * size; ++i) {
    // Small integers: every product and sum is exact.
    a[i] = static_cast<float>(i % 7 - 3);
    b[i] = static_cast<float>(i % 5 - 2);
  }
  pack_rows(size, size, b.data(), size, packed.data());
  std::array<float, size * size> c{};
  try {
    const TileGemmScope scope;
    tile_gemm(size, size, size, a.data(), size, packed.data(), size, c.data(), size, false);
  } catch (const c10::Error&) {
    return false;
  }
  for (int64_t i = 0; i < size; ++i) {
    for (int64_t j = 0; j < size; ++j) {
      float expected = 0;
      for (int64_t k = 0; k < size; ++k) {
        expected += static_cast<float>(a[i * size + k]) * static_cast<float>(b[k * size + j]);
      }
      if (c[i * size + j] != expected) {
        return false;
      }
    }
  }
  return true;
}

// brgemm exists on x86-64 only; elsewhere it raises.
bool multiplies_float() {
  const float one = 1;
  float product = 0;
  try {
    at::native::cpublas::brgemm(1, 1, 1, 1, 1, 1, /*add_C=*/false, &one, &one, &product,
                                /*is_vnni=*/false);
  } catch (const c10::Error&) {
    return false;
  }
  return product == one;
}

template <typename T>
void multiply_plainly(int64_t m, int64_t n, int64_t k, const T* a, int64_t a_stride, const T* b,
                      int64_t b_stride, T* c, int64_t c_stride, bool accumulate) {
  vectorized([=] {
    for (int64_t i = 0; i < m; ++i) {
      T* out = c + i * c_stride;
      for (int64_t j = 0; !accumulate && j < n; ++j) {
        out[j] = 0;
      }
      for (int64_t l = 0; l < k; ++l) {
        const T factor = a[i * a_stride + l];
        const T* row = b + l * b_stride;
        for (int64_t j = 0; j < n; ++j) {
          out[j] += factor * row[j];
        }
      }
    }
  });
}

}  // namespace

// cpublas::could_pack(kBFloat16) asks for AMX, while brgemm also serves AVX512 with bfloat16.
bool has_bfloat16_products() {
  static const bool has = multiply_bfloat16();
  return has;
}

TileGemmScope::~TileGemmScope() { at::native::cpublas::brgemm_release(); }

void tile_gemm(int64_t m, int64_t n, int64_t k, const at::BFloat16* a, int64_t a_stride,
               const at::BFloat16* b, int64_t b_stride, float* c, int64_t c_stride,
               bool accumulate) {
  at::native::cpublas::brgemm(m, n, k, a_stride, b_stride, c_stride, accumulate, a, b, c,
                              /*is_vnni=*/true);
}

void tile_gemm(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_stride, const float* b,
               int64_t b_stride, float* c, int64_t c_stride, bool accumulate) {
  static const bool has_brgemm = multiplies_float();
  if (has_brgemm) {
    at::native::cpublas::brgemm(m, n, k, a_stride, b_stride, c_stride, accumulate, a, b, c,
                                /*is_vnni=*/false);
  } else {
    multiply_plainly(m, n, k, a, a_stride, b, b_stride, c, c_stride, accumulate);
  }
}

// ATen exports no product of double matrices below the level of tensors.
void tile_gemm(int64_t m, int64_t n, int64_t k, const double* a, int64_t a_stride, const double* b,
               int64_t b_stride, double* c, int64_t c_stride, bool accumulate) {
  multiply_plainly(m, n, k, a, a_stride, b, b_stride, c, c_stride, accumulate);
}

}  // namespace ascend_attn::cpu
