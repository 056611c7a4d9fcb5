// Hints for the ends of error messages: how to mend a call whose packs of sequences are wrong.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string_view>

#include "core/layout.h"

namespace ascend_attn {

// For an error about a tensor of the wrong rank.
inline std::string_view hint_for_rank(Layout layout, int64_t rank) {
  return layout == Layout::TND && rank == 4 ? "; tensor.flatten(0, 1) makes a batch one pack" : "";
}

// Returns a hint for the error about cumulative lengths if they look like counts: they add up to
// the number of tokens, and the last one is smaller.
std::string_view hint_for_counts(c10::ArrayRef<int64_t> lengths, int64_t tokens);
inline std::string_view hint_for_counts(c10::ArrayRef<int64_t> lengths, const c10::SymInt& tokens) {
  return hint_for_counts(lengths, tokens.maybe_as_int().value_or(0));
}
// Warns once per process of valid cumulative lengths that look like counts: a pack may have padding
// rows. Called by kernels, after all checks.
void warn_of_counts(std::string_view op, c10::ArrayRef<int64_t> lengths, int64_t tokens);
// Warns once per process of counts of paged keys that look cumulative: each is larger than the one
// before, and one of them reads a block twice. A row of `block_table` has the blocks of a sequence.
void warn_of_cumulative_counts(std::string_view op, c10::ArrayRef<int64_t> keys,
                               const at::Tensor& block_table, int64_t block_size);

}  // namespace ascend_attn
