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
  at::native::cpublas::brgemm(m, n, k, a_stride, b_stride, c_stride, accumulate, a, b, c,
                              /*is_vnni=*/false);
}

// ATen exports no product of double matrices below the level of tensors.
void tile_gemm(int64_t m, int64_t n, int64_t k, const double* a, int64_t a_stride, const double* b,
               int64_t b_stride, double* c, int64_t c_stride, bool accumulate) {
  vectorized([=] {
    for (int64_t i = 0; i < m; ++i) {
      double* out = c + i * c_stride;
      for (int64_t j = 0; !accumulate && j < n; ++j) {
        out[j] = 0;
      }
      for (int64_t l = 0; l < k; ++l) {
        const double factor = a[i * a_stride + l];
        const double* row = b + l * b_stride;
        for (int64_t j = 0; j < n; ++j) {
          out[j] += factor * row[j];
        }
      }
    }
  });
}

}  // namespace ascend_attn::cpu
