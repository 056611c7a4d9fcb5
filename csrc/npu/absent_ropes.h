// Attention without ropes, for functions of CANN that require them: ropes of zeros, which add
// nothing to the scores.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace ascend_attn::aclnn {

struct Ropes {
  at::Tensor query, key;
};

// Returns the ropes of a call, or zeros of the only size that the functions take, in one buffer.
Ropes ropes_or_zeros(const at::Tensor& query, const at::Tensor& key,
                     const std::optional<at::Tensor>& query_rope,
                     const std::optional<at::Tensor>& key_rope);

}  // namespace ascend_attn::aclnn
