// The mask rule of sparse_mode: which keys a query token may attend to.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/sequence_lengths.h"

namespace ascend_attn {

// The modes of the sparse operators.
enum class SparseMode : int64_t {
  all = 0,                // every key of the sequence
  right_down_causal = 3,  // the last query token sees the last key
};

// How many leading keys the query token `row` (counted inside its sequence) may attend to.
inline int64_t visible_keys(const Sequence& sequence, SparseMode mode, int64_t row) {
  if (mode == SparseMode::all) {
    return sequence.key_length;
  }
  return std::max<int64_t>(sequence.key_length - sequence.query_length + row + 1, 0);
}

}  // namespace ascend_attn
