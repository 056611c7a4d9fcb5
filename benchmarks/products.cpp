// Run by products.py: what one thread reaches with the vector unit that
// ASCEND_ATTN_OPS_CPU_CAPABILITY allows.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cpu/common/capability.h"
#include "cpu/common/portable_gemm.h"
#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {
namespace {

// The seconds of the fastest of many calls: others use the machine too.
template <typename Function>
double fastest(const Function& function) {
  constexpr int rounds = 100;
  double best = 1e9;
  for (int round = 0; round < rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    function();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    best = std::min(best, elapsed.count());
  }
  return best;
}

// Multiplications and additions in registers alone, as many independent chains as hide latencies.
double peak() {
  constexpr int64_t chains = 12;
  constexpr int64_t steps = 20000;
  double flops = 0;
  float sink = 0;
  const double seconds = fastest([&] {
    vectorized([&flops, &sink](auto bytes) {
      constexpr int64_t lanes = bytes / sizeof(float);
      float sums[chains][lanes] = {};
      for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 12
        for (int64_t i = 0; i < chains; ++i) {
#pragma omp simd
          for (int64_t j = 0; j < lanes; ++j) {
            sums[i][j] = sums[i][j] * 0.999f + 1e-3f;
          }
        }
      }
#pragma GCC unroll 12
      for (int64_t i = 0; i < chains; ++i) {
        for (int64_t j = 0; j < lanes; ++j) {
          sink += sums[i][j];
        }
      }
      flops = 2.0 * chains * lanes * steps;
    });
  });
  return sink < 0 ? 0 : flops / seconds;  // reads the sums, so that compilers compute them
}

void multiply_plainly(const Product<float>& product) {
  vectorized([p = product] {
    for (int64_t i = 0; i < p.m; ++i) {
      float* out = p.c.row(i);
      std::fill_n(out, p.n, 0.0f);
      for (int64_t l = 0; l < p.k; ++l) {
        const float factor = p.a.row(i)[l];
        for (int64_t j = 0; j < p.n; ++j) {
          out[j] += factor * p.b.row(l)[j];
        }
      }
    }
  });
}

void measure(int64_t m, int64_t n, int64_t k) {
  const std::vector<float> a(m * k, 1.0f);
  const std::vector<float> b(k * n, 1.0f);
  std::vector<float> c(m * n);
  const Product<float> product{m, n, k, {a.data(), k}, {b.data(), n}, {c.data(), n}, false};
  const double flops = 2.0 * m * n * k;
  const double plain = flops / fastest([&] { multiply_plainly(product); });
  const double ours = flops / fastest([&] { multiply(product); });
  std::printf("%ld %ld %ld %.1f %.1f %.1f\n", static_cast<long>(m), static_cast<long>(n),
              static_cast<long>(k), ours / 1e9, plain / 1e9, peak() / 1e9);
}

}  // namespace
}  // namespace ascend_attn::cpu

// Arguments: m n k, as often as wanted. Prints a line for each: m n k, and in GFLOP/s our product,
// one written as three loops, and the limit.
int main(int count, char** arguments) {
  for (int i = 1; i + 2 < count; i += 3) {
    ascend_attn::cpu::measure(std::atol(arguments[i]), std::atol(arguments[i + 1]),
                              std::atol(arguments[i + 2]));
  }
}
