// The defaults of dense attention that depend on its tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <string_view>

#include "core/layout.h"

namespace ascend_attn {

// Fills in the number of query heads, and the scale 1 / sqrt(D), D with its rope. `layout` is none
// if the call names no layout: that is an error of its own.
void add_dense_defaults(std::string_view op, std::optional<Layout> layout, const at::Tensor& query,
                        const std::optional<at::Tensor>& query_rope,
                        std::optional<c10::SymInt>& num_heads, std::optional<double>& scale_value);

}  // namespace ascend_attn
