// Hints for the ends of error messages: how to mend a call whose packs of sequences are wrong.
#pragma once

#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string_view>

#include "core/layout.h"

namespace ascend_attn {

// For an error about a tensor of the wrong rank.
inline std::string_view hint_for_rank(Layout layout, int64_t rank) {
  return layout == Layout::TND && rank == 4 ? "; tensor.flatten(0, 1) makes a batch one pack" : "";
}

// For an error about cumulative lengths that look like the counts of the sequences: read as counts
// they add up to the tokens, read as sums they end before them.
std::string_view hint_for_counts(c10::ArrayRef<int64_t> lengths, int64_t tokens);
std::string_view hint_for_counts(c10::SymIntArrayRef lengths, const c10::SymInt& tokens);
// Warns once in a process of cumulative lengths that look like counts where no error says so: a
// pack may have padding rows. Called by kernels, after all checks.
void warn_of_counts(std::string_view op, c10::ArrayRef<int64_t> lengths, int64_t tokens);

}  // namespace ascend_attn
