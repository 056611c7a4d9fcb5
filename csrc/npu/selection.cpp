#include "npu/selection.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cummin.h>
#include <ATen/ops/full.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "core/sparse_mode.h"

namespace ascend_attn::aclnn {
namespace {

constexpr int64_t kNone = -2;  // no block, and no gap either

}  // namespace

at::Tensor sequences_of_rows(const at::Tensor& ends, const at::Tensor& rows) {
  return at::searchsorted(ends, rows, /*out_int32=*/false, /*right=*/true)
      .clamp_max(ends.size(0) - 1);
}

at::Tensor visible_keys_of_rows(const at::Tensor& query, const at::Tensor& key,
                                const SparseAttentionOptions& options, bool paged) {
  const auto integers = query.options().dtype(at::kLong);
  const bool causal = options.sparse_mode == static_cast<int64_t>(SparseMode::right_down_causal);
  const auto& query_lengths = options.actual_seq_lengths_query;
  const auto& key_lengths = options.actual_seq_lengths_key;
  const auto rows = at::arange(query.size(-3), integers);
  at::Tensor visible;
  if (options.layout == Layout::BSND) {
    visible = key_lengths ? key_lengths->view({-1, 1}) : at::full({1, 1}, key.size(1), integers);
    if (causal) {
      visible = (query_lengths ? visible - query_lengths->view({-1, 1}) : visible - query.size(1)) +
                (rows + 1);
    }
  } else {
    const auto& query_ends = *query_lengths;
    const auto begins = [](const at::Tensor& ends) {
      return at::cat({at::zeros({1}, ends.options()), ends.narrow(0, 0, ends.size(0) - 1)});
    };
    const auto keys = paged ? *key_lengths : *key_lengths - begins(*key_lengths);
    const auto sequences = sequences_of_rows(query_ends, rows);
    visible = (causal ? keys - query_ends : keys).index_select(0, sequences);
    if (causal) {
      visible = visible + (rows + 1);
    }
  }
  return visible.clamp_min(0).unsqueeze(-1).unsqueeze(-1);
}

at::Tensor ended_by_first_gap(const at::Tensor& selection) {
  return selection.size(-1) == 0
             ? selection
             : selection.masked_fill(std::get<0>(selection.cummin(-1)) < 0, /*value=*/-1);
}

at::Tensor with_cut_block_last(const at::Tensor& selection, const at::Tensor& query,
                               const at::Tensor& key, const SparseAttentionOptions& options) {
  const auto& lengths = options.actual_seq_lengths_key;
  const auto block = options.sparse_block_size;
  const bool whole_blocks = !lengths && options.sparse_mode == 0 && key.size(1) % block == 0;
  if (selection.numel() == 0 || whole_blocks || (lengths && lengths->numel() == 0)) {
    return selection;
  }
  const auto visible = visible_keys_of_rows(query, key, options, /*paged=*/false);
  const auto whole = visible.floor_divide(block);
  const auto rest = visible - whole * block;
  const auto cut = at::where(rest == 0, kNone, whole);
  const auto slots = at::arange(selection.size(-1), visible.options().dtype(at::kLong));
  // The slots that are read, up to a gap.
  const auto gaps = at::where(selection < 0, slots, selection.size(-1)).amin(-1, /*keepdim=*/true);
  const auto last = at::minimum(gaps, whole + (rest != 0)) - 1;
  const auto found = at::where((selection == cut).logical_and_(slots <= last), slots, kNone)
                         .amax(-1, /*keepdim=*/true);
  // A row without the block keeps its order, as if its last block were the cut one.
  const auto from = at::where(found == kNone, last, found);
  const auto behind = (slots >= from).logical_and_(slots < last);
  return selection.gather(-1, at::where(slots == last, from, slots + behind));
}

}  // namespace ascend_attn::aclnn
