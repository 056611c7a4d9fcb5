#include "ops/attention_update.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <limits>

#include "cpu/common/token_rows.h"
#include "dispatch/operator.h"

namespace ascend_attn::cpu {
namespace {

// Rows are merged in blocks of this many columns, so that the sums stay in L1.
constexpr int64_t kColumns = 256;
// The least number of elements per thread.
constexpr int64_t kGrain = 32768;

// The rows of a tensor.
template <typename T>
struct Rows {
  explicit Rows(at::Tensor rows)
      : tensor(std::move(rows)), data(tensor.const_data_ptr<T>()), stride(tensor.stride(0)) {}

  const T* operator[](int64_t index) const { return data + index * stride; }

  at::Tensor tensor;
  const T* data;
  int64_t stride;
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
void merge(const AttentionUpdate& op, const at::Tensor& out, const at::Tensor& lse_out) {
  using T = Accumulator<Input>;
  const int64_t rows = lse_out.numel();
  const int64_t size = out.size(-1);
  const auto n = static_cast<int64_t>(op.lse.size());
  std::vector<Rows<T>> lse;
  std::vector<Rows<Input>> parts;
  for (int64_t i = 0; i < n; ++i) {
    lse.emplace_back(op.lse[i].reshape({rows}));
    parts.emplace_back(with_dense_rows(op.local_out[i]).reshape({rows, size}));
  }
  auto* merged_lse = lse_out.mutable_data_ptr<T>();
  auto* merged = out.mutable_data_ptr<Input>();
  const int64_t grain = kGrain / std::max<int64_t>(n * size, 1) + 1;
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<T> weights(n);
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t i = 0; i < n; ++i) {
        // As on the device, from CANN 8.5 on: plus infinity marks a part without keys as well.
        const T given = *lse[i][row];
        weights[i] = given == std::numeric_limits<T>::infinity() ? -given : given;
      }
      merged_lse[row] = to_weights(weights.data(), n);
      Input* to = merged + row * size;
      if (merged_lse[row] == -std::numeric_limits<T>::infinity()) {
        // No product with zero: a part without keys may hold NaN.
        std::fill_n(to, size, Input(0));
        continue;
      }
      vectorized([&, weight = weights.data()] {
        std::array<T, kColumns> sums;
        for (int64_t column = 0; column < size; column += kColumns) {
          const int64_t width = std::min(kColumns, size - column);
          // The neutral element of sums: 0 would make 0 of -0.
          sums.fill(T(-0.0));
          for (int64_t i = 0; i < n; ++i) {
            const Input* from = parts[i][row] + column;
            for (int64_t j = 0; j < width; ++j) {
              sums[j] += weight[i] * static_cast<T>(from[j]);
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
  dispatch_operand(std::get<0>(outputs).scalar_type(), [&]<typename Input, typename Operand>() {
    merge<Input>(op, std::get<0>(outputs), std::get<1>(outputs));
  });
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) { register_kernel<AttentionUpdate, attention_update>(m); }

}  // namespace
}  // namespace ascend_attn::cpu
