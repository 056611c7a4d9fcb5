// Helpers shared by the indexer kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "cpu/common/token_rows.h"

namespace ascend_attn::cpu {

// Returns max(x, 0), propagating NaN.
template <typename T>
T relu(T x) {
  return x < 0 ? T(0) : x;
}

// The head weights, (B, S, heads) or (T, heads), in the dtype of query or in fp32.
template <typename Input>
class HeadWeights {
 public:
  explicit HeadWeights(const at::Tensor& weights)
      : weights_(with_dense_rows(weights.unsqueeze(-2))) {}

  // `token` counts over the flattened token axes.
  template <typename T>
  void load(int64_t token, T* to) const {
    if (weights_.scalar_type() == at::kFloat) {
      load_row(TokenRows<float>(weights_, token).row(0), to, weights_.size(-1));
    } else {
      load_row(TokenRows<Input>(weights_, token).row(0), to, weights_.size(-1));
    }
  }

 private:
  at::Tensor weights_;
};

}  // namespace ascend_attn::cpu
