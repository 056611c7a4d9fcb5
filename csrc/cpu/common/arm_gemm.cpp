#include "cpu/common/arm_gemm.h"

#include "cpu/common/capability.h"

#if defined(__aarch64__) && defined(__linux__) && defined(__GNUC__)

#include <arm_neon.h>
#include <sys/auxv.h>

#include <algorithm>
#include <cstring>

// Every function that runs the instructions, or that is inlined into one that does, needs it.
#define ASCEND_ATTN_MATRIX_INSTRUCTIONS gnu::target("arch=armv8.2-a+bf16+i8mm")

namespace ascend_attn::cpu {
namespace {

// One instruction adds the products of two rows of A and two columns of B to a 2 x 2 block of C.
// It reads eight bytes of each row and column: two groups, each the elements of B that are adjacent
// in the packed layout.
constexpr int64_t kGroupBytes = 4;
constexpr int64_t kRows = 8;      // of a block of C, which stays in registers
constexpr int64_t kColumns = 8;   // of the same
constexpr int64_t kGroups = 256;  // of a packed panel of B, which stays in the L1 cache

[[ASCEND_ATTN_MATRIX_INSTRUCTIONS]] inline float32x4_t add_products(float32x4_t sum, uint64x2_t a,
                                                                    uint64x2_t b) {
  return vbfmmlaq_f32(sum, vreinterpretq_bf16_u64(a), vreinterpretq_bf16_u64(b));
}
[[ASCEND_ATTN_MATRIX_INSTRUCTIONS]] inline int32x4_t add_products(int32x4_t sum, uint64x2_t a,
                                                                  uint64x2_t b) {
  return vusmmlaq_s32(sum, vreinterpretq_u8_u64(a), vreinterpretq_s8_u64(b));
}
inline void store(float* to, float32x4_t sum) { vst1q_f32(to, sum); }
inline void store(int32_t* to, int32x4_t sum) { vst1q_s32(to, sum); }

// Element [g / 2][j / 2] holds groups g and g + 1 of column j, and the same of column j + 1.
using Panel = uint64x2_t[kGroups / 2][kColumns / 2];

// Groups and columns beyond the last are zero.
void pack(const uint8_t* b, int64_t row_bytes, int64_t groups, int64_t columns, Panel& panel) {
  for (int64_t g = 0; g < groups; g += 2) {
    uint32_t rows[2][kColumns] = {};
    for (int64_t i = 0; i < std::min<int64_t>(2, groups - g); ++i) {
      const auto* from = b + (g + i) * row_bytes;
      if (columns == kColumns) {
        std::memcpy(rows[i], from, sizeof(rows[i]));
      } else {
        std::memcpy(rows[i], from, static_cast<size_t>(columns * kGroupBytes));
      }
    }
    for (int64_t j = 0; j < kColumns; j += 4) {
      const auto first = vld1q_u32(rows[0] + j);
      const auto second = vld1q_u32(rows[1] + j);
      panel[g / 2][j / 2] = vreinterpretq_u64_u32(vzip1q_u32(first, second));
      panel[g / 2][j / 2 + 1] = vreinterpretq_u64_u32(vzip2q_u32(first, second));
    }
  }
}

// Adds the products with one row of the panel, of which A has `bytes` in each row.
template <size_t bytes, typename Sums>
[[ASCEND_ATTN_MATRIX_INSTRUCTIONS]] inline void add_row(const uint8_t* const* a, int64_t offset,
                                                        const uint64x2_t* b, Sums& sums) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < kRows / 2; ++i) {
    uint64_t pair[2] = {};
    std::memcpy(&pair[0], a[2 * i] + offset, bytes);
    std::memcpy(&pair[1], a[2 * i + 1] + offset, bytes);
    const auto rows = vcombine_u64(vcreate_u64(pair[0]), vcreate_u64(pair[1]));
#pragma GCC unroll 4
    for (int64_t j = 0; j < kColumns / 2; ++j) {
      sums[i][j] = add_products(sums[i][j], rows, b[j]);
    }
  }
}

// C (rows, columns) = A (rows, groups) * panel, or C += A * panel.
template <typename Vector, typename C>
[[ASCEND_ATTN_MATRIX_INSTRUCTIONS]] void multiply_block(const uint8_t* const* a, int64_t groups,
                                                        const Panel& panel, int64_t rows,
                                                        int64_t columns, const Matrix<C>& c,
                                                        bool accumulate) {
  Vector sums[kRows / 2][kColumns / 2] = {};
  int64_t g = 0;
  for (; g + 2 <= groups; g += 2) {
    add_row<2 * kGroupBytes>(a, g * kGroupBytes, panel[g / 2], sums);
  }
  if (g < groups) {
    add_row<kGroupBytes>(a, g * kGroupBytes, panel[g / 2], sums);
  }
  C block[kRows / 2][kColumns / 2][2][2];
#pragma GCC unroll 4
  for (int64_t i = 0; i < kRows / 2; ++i) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < kColumns / 2; ++j) {
      store(&block[i][j][0][0], sums[i][j]);
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    C* to = c.row(i);
    for (int64_t j = 0; j < columns; ++j) {
      const C sum = block[i / 2][j / 2][i % 2][j % 2];
      to[j] = accumulate ? to[j] + sum : sum;
    }
  }
}

template <typename Vector, typename A, typename B, typename C>
void multiply(const MatrixProduct<A, B, C>& p) {
  constexpr int64_t step = kGroupBytes / sizeof(A);  // elements of a group
  const auto* all_a = reinterpret_cast<const uint8_t*>(p.a.data());
  const auto* all_b = reinterpret_cast<const uint8_t*>(p.b.data());
  const int64_t all_groups = p.k / step;
  Panel panel;
  for (int64_t j = 0; j < p.n; j += kColumns) {
    const int64_t columns = std::min(kColumns, p.n - j);
    for (int64_t first = 0; first == 0 || first < all_groups; first += kGroups) {
      const int64_t groups = std::min(kGroups, all_groups - first);
      pack(all_b + (first * p.b.stride() + j) * kGroupBytes, p.b.stride() * kGroupBytes, groups,
           columns, panel);
      for (int64_t i = 0; i < p.m; i += kRows) {
        const int64_t rows = std::min(kRows, p.m - i);
        const uint8_t* a[kRows];
        for (int64_t r = 0; r < kRows; ++r) {
          // Rows beyond the last repeat it, and their products are dropped.
          a[r] =
              all_a + (i + std::min(r, rows - 1)) * p.a.stride() * sizeof(A) + first * kGroupBytes;
        }
        multiply_block<Vector>(a, groups, panel, rows, columns, p.c.from(i, j),
                               p.accumulate || first > 0);
      }
    }
  }
}

bool processor_has(uint64_t feature) { return kNative && (getauxval(AT_HWCAP2) & feature) != 0; }

}  // namespace

bool has_bfmmla() {
  static const bool has = processor_has(HWCAP2_BF16);
  return has;
}

bool has_usmmla() {
  static const bool has = processor_has(HWCAP2_I8MM);
  return has;
}

void multiply_with_bfmmla(const MatrixProduct<at::BFloat16, at::BFloat16, float>& product) {
  multiply<float32x4_t>(product);
}

void multiply_with_usmmla(const MatrixProduct<uint8_t, int8_t, int32_t>& product) {
  multiply<int32x4_t>(product);
}

}  // namespace ascend_attn::cpu

#else

namespace ascend_attn::cpu {

bool has_bfmmla() { return false; }
bool has_usmmla() { return false; }
void multiply_with_bfmmla(const MatrixProduct<at::BFloat16, at::BFloat16, float>&) {}
void multiply_with_usmmla(const MatrixProduct<uint8_t, int8_t, int32_t>&) {}

}  // namespace ascend_attn::cpu

#endif
