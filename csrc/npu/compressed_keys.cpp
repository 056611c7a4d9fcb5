#include "npu/compressed_keys.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/diff.h>
#include <ATen/ops/full.h>

namespace ascend_attn::aclnn {

at::Tensor cu_seqlens(const at::Tensor& ends) { return at::constant_pad_nd(ends, {1, 0}); }

at::Tensor derived_residual(const TokenCounts& tokens, const TokenCounts& keys, int64_t ratio,
                            int64_t batch, const at::Tensor& like) {
  const auto full = [&](int64_t count) {
    return at::full({batch}, count, like.options().dtype(at::kInt));
  };
  if (!tokens.lengths && !keys.lengths) {
    return full(tokens.all - keys.all * ratio);
  }
  const auto count = [&](const TokenCounts& counts) {
    const auto& lengths = counts.lengths;
    if (!lengths) {
      return full(counts.all);
    }
    return counts.cumulative ? at::diff(cu_seqlens(*lengths)) : *lengths;
  };
  return count(tokens).sub(count(keys), ratio);
}

}  // namespace ascend_attn::aclnn
