#include "npu/compressed_keys.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>

namespace ascend_attn::aclnn {

at::Tensor cu_seqlens(const at::Tensor& ends) { return at::constant_pad_nd(ends, {1, 0}); }

at::Tensor token_counts(const std::optional<at::Tensor>& lengths, bool cumulative, int64_t batch,
                        int64_t tokens, const at::Tensor& like) {
  if (!lengths) {
    return at::full({batch}, tokens, like.options().dtype(at::kInt));
  }
  if (!cumulative) {
    return *lengths;
  }
  const auto ends = cu_seqlens(*lengths);
  return *lengths - ends.narrow(0, 0, lengths->size(0));
}

}  // namespace ascend_attn::aclnn
