// Packs for the indexers of which no sequence has both queries and keys: the kernels write their
// rows once per sequence, over what lies behind the outputs.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <numeric>

#include "core/sequence_lengths.h"

namespace ascend_attn::aclnn {

// Whether lengths that the host has say that a call is such a pack.
template <typename Op>
bool lacks_pairs(const Op& op) {
  const auto& queries = op.actual_seq_lengths_query;
  const auto& keys = op.actual_seq_lengths_key;
  if (op.layout != Layout::TND || queries.waits() || keys.waits()) {
    return false;
  }
  auto key_ends = keys.values().vec();
  if (op.pages.given()) {
    std::partial_sum(key_ends.begin(), key_ends.end(), key_ends.begin());
  }
  return std::ranges::all_of(packed_sequences(queries.values(), key_ends), &Sequence::empty);
}

// Whether the device alone knows that of keys side by side. In a pack of one sequence, the rows are
// the outputs.
template <typename Op>
bool may_lack_pairs(const Op& op) {
  const auto& queries = op.actual_seq_lengths_query;
  return op.layout == Layout::TND && !op.pages.given() && queries->numel() > 1 &&
         (queries.waits() || op.actual_seq_lengths_key.waits());
}

// Launches such a pack as one query and one key. Returns whether it was one, for the row that the
// caller then overwrites.
template <typename Op, typename Launch>
at::Tensor launch_with_a_pair(const Op& op, const Launch& launch) {
  const auto ends = at::stack({*op.actual_seq_lengths_query, *op.actual_seq_lengths_key});
  const auto begins = at::constant_pad_nd(ends.narrow(1, 0, ends.size(1) - 1), {1, 0});
  const auto lengths = ends - begins;
  auto no_pairs = at::minimum(lengths[0], lengths[1]).amax() <= 0;
  auto pack = op;
  pack.actual_seq_lengths_query = op.actual_seq_lengths_query->masked_fill(no_pairs, 1);
  pack.actual_seq_lengths_key = op.actual_seq_lengths_key->masked_fill(no_pairs, 1);
  launch(pack);
  return no_pairs;
}

}  // namespace ascend_attn::aclnn
