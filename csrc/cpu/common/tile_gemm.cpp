#include "cpu/common/tile_gemm.h"

#include <ATen/Context.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <array>
#include <exception>

#include "cpu/common/arm_gemm.h"
#include "cpu/common/capability.h"
#include "cpu/common/matrix_products.h"
#include "cpu/common/portable_gemm.h"

namespace ascend_attn::cpu {
namespace {

// torch's brgemm, which raises std::bad_alloc for empty matrices of 16-bit numbers.
template <typename A, typename B, typename C>
void multiply_with_brgemm(const MatrixProduct<A, B, C>& p) {
  if (p.k == 0 && !p.accumulate) {
    for (int64_t i = 0; i < p.m; ++i) {
      std::fill_n(p.c.row(i), p.n, C(0));
    }
  }
  if (p.m > 0 && p.n > 0 && p.k > 0) {
    at::native::cpublas::brgemm(p.m, p.n, p.k, p.a.stride(), p.b.stride(), p.c.stride(),
                                p.accumulate, p.a.data(), p.b.data(), p.c.data(),
                                /*is_vnni=*/sizeof(A) < 4);
  }
}

// Returns whether brgemm multiplies matrices of these types, which it or oneDNN raises for where it
// does not.
template <typename A, typename B, typename C>
bool multiplies(A a, B b) {
  constexpr int64_t size = 16;
  std::array<A, size * size> left;
  std::array<B, size * size> right;
  std::array<C, size * size> products{};
  left.fill(a);
  right.fill(b);
  try {
    const TileGemmScope scope;
    multiply_with_brgemm(MatrixProduct<A, B, C>{size,
                                                size,
                                                size,
                                                {left.data(), size},
                                                {right.data(), size},
                                                {products.data(), size},
                                                false});
  } catch (const std::exception&) {
    return false;
  }
  const auto expected = size * static_cast<C>(a) * static_cast<C>(b);
  return std::ranges::all_of(products, [=](C product) { return product == expected; });
}

bool multiply_bfloat16() {
  return has_bfmmla() || multiplies<at::BFloat16, at::BFloat16, float>(3, -2);
}

// brgemm of float exists on x86-64 only. Elsewhere torch calls its BLAS instead, which has threads
// of its own, and may sum a row in another order where there are more rows.
bool multiply_float() {
#if defined(__x86_64__)
  return multiplies<float, float, float>(3, -2);
#else
  return false;
#endif
}

// brgemm requires AVX512 with VNNI. With an unsigned A it is exact; with a signed A it would need,
// except on AMX, a correction that it leaves to the caller. Tests the largest values, because
// implementations that add pairs of products in 16 bits would saturate.
bool multiply_int8() { return multiplies<uint8_t, int8_t, int32_t>(255, -128); }

// torch's brgemm refuses what torch.backends.mkldnn.flags(enabled=False) switches off. That is
// asked for in every call, and the processor only once.
template <bool multiply_one()>
bool has_brgemm() {
  if (!at::globalContext().userEnabledMkldnn()) {
    return false;
  }
  static const bool has = kNative && multiply_one();
  return has;
}

bool has_float_brgemm() {
  return product_choice().products != MatrixProducts::portable && has_brgemm<multiply_float>();
}
bool has_int8_brgemm() { return has_brgemm<multiply_int8>(); }

// Floats sum integers exactly up to 2^24, which 512 products of 255 * 128 do not reach.
void multiply_as_floats(const MatrixProduct<uint8_t, int8_t, int32_t>& p) {
  constexpr int64_t exact_depth = 512;
  constexpr int64_t step = depth_step<int8_t>;
  const Tile<float> left(p.m, std::min(p.k, exact_depth));
  const Tile<float> right(std::min(p.k, exact_depth), p.n);
  const Tile<float> product(p.m, p.n);
  for (int64_t first = 0; first < p.k; first += exact_depth) {
    const int64_t depth = std::min(exact_depth, p.k - first);
    for (int64_t i = 0; i < p.m; ++i) {
      convert(p.a.row(i) + first, left.row(i), depth);
    }
    vectorized([=, n = p.n, from = p.b.from(first), to = right.data()] {
      for (int64_t l = 0; l < depth; l += step) {
        for (int64_t j = 0; j < n; ++j) {
          for (int64_t x = 0; x < step; ++x) {
            to[(l + x) * n + j] = from.row(l)[step * j + x];
          }
        }
      }
    });
    tile_gemm(MatrixProduct<float>{p.m, p.n, depth, left, right, product, false});
    vectorized(
        [m = p.m, n = p.n, c = p.c, keep = p.accumulate || first > 0, from = product.data()] {
          for (int64_t i = 0; i < m; ++i) {
            int32_t* row = c.row(i);
            for (int64_t j = 0; j < n; ++j) {
              const int32_t before = keep ? row[j] : 0;
              row[j] = before + static_cast<int32_t>(from[i * n + j]);
            }
          }
        });
  }
}

}  // namespace

bool has_int8_products() { return has_int8_brgemm() || has_usmmla(); }

// Not cpublas::could_pack(kBFloat16), which requires AMX: brgemm also supports AVX512 with
// bfloat16.
bool has_bfloat16_products() {
  return product_choice().products == MatrixProducts::bfloat16 && has_brgemm<multiply_bfloat16>();
}

TileGemmScope::~TileGemmScope() { at::native::cpublas::brgemm_release(); }

void tile_gemm(const MatrixProduct<at::BFloat16, at::BFloat16, float>& product) {
  has_bfmmla() ? multiply_with_bfmmla(product) : multiply_with_brgemm(product);
}

void tile_gemm(const MatrixProduct<float>& product) {
  has_float_brgemm() ? multiply_with_brgemm(product) : multiply(product);
}

// ATen exports no double matrix product below the tensor level.
void tile_gemm(const MatrixProduct<double>& product) { multiply(product); }

void tile_gemm(const MatrixProduct<uint8_t, int8_t, int32_t>& product) {
  has_int8_brgemm() ? multiply_with_brgemm(product)
  : has_usmmla()    ? multiply_with_usmmla(product)
                    : multiply_as_floats(product);
}

std::vector<Implementation> implementations() {
  // torch packs bfloat16 for the products of AMX alone.
  const bool has_amx = at::native::cpublas::could_pack(at::kBFloat16);
  const std::string brgemm = has_amx ? "brgemm (AMX)" : "brgemm";
  return {{"vector loops", vector_unit_name()},
          {"bfloat16 products", !has_bfloat16_products() ? "as float32"
                                : has_bfmmla()           ? "BFMMLA"
                                                         : brgemm},
          {"float32 products", has_float_brgemm() ? "brgemm" : "vector blocks"},
          {"int8 products", has_int8_brgemm() ? brgemm
                            : has_usmmla()    ? "USMMLA"
                                              : "as float32"},
          {"products chosen by", product_choice().reason}};
}

}  // namespace ascend_attn::cpu
