// The argument sparse_indices: the keys that each query token selects.
#pragma once

#include <ATen/core/Tensor.h>

namespace ascend_attn {

// Adds the axis of the one key head, which sparse_indices and the gradient of the indexer's values
// may leave out.
inline at::Tensor with_head_axis(const at::Tensor& selection, const at::Tensor& query) {
  return selection.dim() == query.dim() ? selection : selection.unsqueeze(-2);
}

}  // namespace ascend_attn
