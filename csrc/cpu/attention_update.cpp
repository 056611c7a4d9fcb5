#include "ops/attention_update.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "cpu/common/tile_gemm.h"
#include "cpu/common/token_rows.h"
#include "cpu/common/vectorized.h"
#include "dispatch/operator.h"

namespace ascend_attn::cpu {
namespace {

// Rows are merged in blocks of this many columns, so that the sums stay in L1.
constexpr int64_t kColumns = 256;
// The least number of elements per thread.
constexpr int64_t kGrain = 32768;

// One partial result, as rows.
template <typename Input>
struct Part {
  using T = Accumulator<Input>;

  Part(const at::Tensor& all_lse, const at::Tensor& all_out, int64_t rows, int64_t size)
      : lse_tensor(all_lse.reshape({rows})),
        out_tensor(with_dense_rows(all_out).reshape({rows, size})),
        lse(lse_tensor.const_data_ptr<T>()),
        out(out_tensor.const_data_ptr<Input>()),
        lse_stride(lse_tensor.stride(0)),
        out_stride(out_tensor.stride(0)) {}

  at::Tensor lse_tensor, out_tensor;
  const T* lse;
  const Input* out;
  int64_t lse_stride, out_stride;
};

// Replaces the lse of each part by its weight (they sum to one, or are zero if no part has a key)
// and returns the merged lse.
template <typename T>
T to_weights(T* lse, int64_t n) {
  T max = lse[0];
  for (int64_t i = 1; i < n; ++i) {
    // Propagates NaN.
    max = lse[i] > max || std::isnan(lse[i]) ? lse[i] : max;
  }
  if (max == -std::numeric_limits<T>::infinity()) {
    std::fill_n(lse, n, T(0));
    return max;
  }
  T sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    lse[i] = std::exp(lse[i] - max);
    sum += lse[i];
  }
  for (int64_t i = 0; i < n; ++i) {
    lse[i] /= sum;
  }
  return max + std::log(sum);
}

template <typename Input>
void merge(const std::vector<Part<Input>>& parts, int64_t rows, int64_t size, Input* out,
           Accumulator<Input>* lse_out) {
  using T = Accumulator<Input>;
  const auto n = static_cast<int64_t>(parts.size());
  const int64_t grain = kGrain / std::max<int64_t>(n * size, 1) + 1;
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<T> weights(n);
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t i = 0; i < n; ++i) {
        weights[i] = parts[i].lse[row * parts[i].lse_stride];
      }
      lse_out[row] = to_weights(weights.data(), n);
      Input* to = out + row * size;
      if (lse_out[row] == -std::numeric_limits<T>::infinity()) {
        // No product with zero: a part without keys may hold NaN.
        std::fill_n(to, size, Input(0));
        continue;
      }
      vectorized([&, weight = weights.data()] {
        std::array<T, kColumns> sums;
        for (int64_t column = 0; column < size; column += kColumns) {
          const int64_t width = std::min(kColumns, size - column);
          for (int64_t i = 0; i < n; ++i) {
            const Input* from = parts[i].out + row * parts[i].out_stride + column;
            if (i == 0) {
              for (int64_t j = 0; j < width; ++j) {
                sums[j] = weight[0] * static_cast<T>(from[j]);
              }
            } else {
              for (int64_t j = 0; j < width; ++j) {
                sums[j] += weight[i] * static_cast<T>(from[j]);
              }
            }
          }
          for (int64_t j = 0; j < width; ++j) {
            to[column + j] = static_cast<Input>(sums[j]);
          }
        }
      });
    }
  });
}

void attention_update(const AttentionUpdate& op, AttentionUpdate::Outputs& outputs) {
  // Not structured bindings: Clang 16 cannot capture those where OpenMP is enabled.
  const auto& out = std::get<0>(outputs);
  const auto& lse_out = std::get<1>(outputs);
  const int64_t rows = lse_out.numel();
  const int64_t size = out.size(-1);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(),
                                  AttentionUpdate::name, [&] {
                                    std::vector<Part<scalar_t>> parts;
                                    for (size_t i = 0; i < op.lse.size(); ++i) {
                                      parts.emplace_back(op.lse[i], op.local_out[i], rows, size);
                                    }
                                    merge(parts, rows, size, out.mutable_data_ptr<scalar_t>(),
                                          lse_out.mutable_data_ptr<Accumulator<scalar_t>>());
                                  });
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) { register_kernel<AttentionUpdate, attention_update>(m); }

}  // namespace
}  // namespace ascend_attn::cpu
