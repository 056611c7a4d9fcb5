// The axis order of the tensors. B batch, S sequence, N heads, D head size, H = N * D, T all tokens
// of all sequences, packed. BNSD_BSND: BNSD, and BSND of the output.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <initializer_list>
#include <string_view>

namespace ascend_attn {

enum class Layout { BSND, TND, BNSD, BSH, SBH, BNSD_BSND };

// The layout of that name, when it is one of `allowed`.
Layout parse_layout(std::string_view op, std::string_view name,
                    std::initializer_list<Layout> allowed);

std::string_view layout_name(Layout layout);

}  // namespace ascend_attn
