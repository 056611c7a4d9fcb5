// Keys in the blocks of a cache, as they are served: key (num_blocks, block_size, 1, D), and a
// table that names the blocks of each sequence in order.
#pragma once

#include <optional>
#include <string_view>

#include "dispatch/arguments.h"

namespace ascend_attn {

// The arguments of the operators that read paged keys.
struct KeyPages {
  static constexpr bool is_argument_group = true;

  KeyLayoutArgument key_layout;
  std::optional<at::Tensor> block_table;

  bool given() const { return key_layout.paged(); }
  // The key lengths that the device gets.
  std::string_view layout(const LayoutArgument& layout_query) const {
    return given() ? KeyLayoutArgument::kPaged : layout_query.text();
  }
};

}  // namespace ascend_attn
