#include "npu/dense_lists.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "core/error.h"
#include "core/sequence_lengths.h"
#include "core/sparse_mode.h"
#include "npu/aclnn/product.h"
#include "npu/compressed_masks.h"
#include "npu/kernel.h"

namespace ascend_attn::aclnn {

int64_t within_int32(int64_t tokens) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  return std::clamp(tokens, -kMax, kMax);
}

DenseLists::DenseLists(const at::Tensor& query, const at::Tensor& key,
                       const FlashAttentionOptions& options)
    : prefix(integers_of(options.prefix.values())) {
  if (options.layout == Layout::TND) {
    query_ends = integers_of(options.actual_seq_lengths_query.values());
    key_ends = integers_of(options.actual_seq_lengths_key.values());
    mark_padding(query, key, options);
  }
}

// A pack with tokens behind its sequences, of queries and of keys: from CANN 9.0 on A2 and A3 want
// one more element in both lists, which is 0. It counts as a sequence, so that `prefix` has one
// more too. Beside slopes or a mask of every sequence, the caller adds the 0.
void DenseLists::mark_padding(const at::Tensor& query, const at::Tensor& key,
                              const FlashAttentionOptions& options) {
  static const bool wanted = runs_on(kA2A3.since(Cann::v9_0));
  if (has_row_per_sequence(options)) {
    return;
  }
  const auto padded = [](const at::Tensor& tokens, const IntegerList& ends) {
    return !ends.empty() && ends.back() != 0 && tokens.size(0) > ends.back();
  };
  if (wanted && padded(query, query_ends) && padded(key, key_ends)) {
    query_ends.push_back(0);
    key_ends.push_back(0);
    if (!prefix.empty()) {
      prefix.push_back(0);
    }
  }
}

namespace {

int64_t sum_of(const IntegerList& ends) {
  return ends.empty() ? 0 : *std::ranges::max_element(ends);
}

// The position of each token in its sequence, for sequences that lie one behind the other. Made on
// the device: a graph would copy from memory of the host again in every replay.
at::Tensor positions_of(const IntegerList& ends, const at::TensorOptions& options) {
  std::vector<at::Tensor> positions;
  int64_t begin = 0;
  for (const auto end : ends) {
    if (end > begin) {
      positions.push_back(at::arange(end - begin, options));
      begin = end;
    }
  }
  return at::cat(positions);
}

// In sparse_mode 0 the device leaves out whole tiles by pre_tokens and next_tokens, and within a
// tile it keeps what the mask keeps: the mask has to hold the band too.
std::optional<at::Tensor> mask_with_band(const char* op, const FlashAttentionOptions& o,
                                         const DenseLists& lists) {
  if (!o.atten_mask || o.sparse_mode != static_cast<int64_t>(SparseMode::standard)) {
    return o.atten_mask;
  }
  const auto mask = *o.atten_mask;
  const auto queries = mask.size(-2);
  const auto keys = mask.size(-1);
  if (mask.numel() == 0 || (o.pre_tokens >= queries - 1 && o.next_tokens >= keys - 1)) {
    return mask;
  }
  check_implemented(GivenWorkspace::current() == nullptr, op, "atten_mask",
                    "expected pre_tokens and next_tokens that exclude nothing beside the mask of a "
                    "call whose lengths a graph updates, got ",
                    o.pre_tokens, " and ", o.next_tokens, "; put what they exclude into the mask");
  // A mask of (sum Sq, sum Skv) has the scores of every sequence on its diagonal; all others are
  // counted from the first token of a sequence.
  const bool of_pack = o.layout == Layout::TND && mask.dim() == 2 &&
                       queries == sum_of(lists.query_ends) && keys == sum_of(lists.key_ends);
  const auto integers = mask.options().dtype(at::kInt);
  const auto positions = [&](int64_t count, const IntegerList& ends) {
    return of_pack ? positions_of(ends, integers) : at::arange(count, integers);
  };
  const auto rows = positions(queries, lists.query_ends).unsqueeze(-1);
  const auto columns = positions(keys, lists.key_ends);
  const auto behind = columns < rows - std::clamp(o.pre_tokens, -keys, queries);
  const auto ahead = columns > rows + std::clamp(o.next_tokens, -queries, keys);
  return mask.logical_or(behind.logical_or(ahead)).view(mask.scalar_type());
}

// The device takes full masks with an axis of 1 for the heads, or for batches and heads, alone.
std::optional<at::Tensor> expanded_mask(const char* op, const at::Tensor& query,
                                        const at::Tensor& key, const FlashAttentionOptions& o,
                                        const DenseLists& lists) {
  const auto& mask = o.atten_mask;
  if (!mask || mask->dim() != 4 || has_compressed_mask(static_cast<SparseMode>(o.sparse_mode))) {
    return mask;
  }
  const auto axes = axes_of(o.layout.value());
  const bool packed = axes.packed();
  const bool per_head = mask->size(1) != 1;
  // The 0 that marks padding counts as a sequence.
  const auto batches =
      packed ? static_cast<int64_t>(lists.query_ends.size()) : query.size(axes.batch);
  const std::array<int64_t, 4> sizes{per_head ? batches : mask->size(0),
                                     per_head ? o.heads().expect_int() : 1,
                                     packed ? longest(lists.query_ends) : query.size(axes.tokens),
                                     packed ? longest(lists.key_ends) : key.size(axes.tokens)};
  if (mask->sizes() == at::IntArrayRef(sizes)) {
    return mask;
  }
  check_implemented(GivenWorkspace::current() == nullptr, op, "atten_mask",
                    "expected a mask without axes to expand, as a graph updates the lengths of the "
                    "call, got ",
                    mask->sizes());
  return mask->expand(sizes).contiguous();
}

}  // namespace

std::optional<at::Tensor> launched_bias(const FlashAttentionOptions& options) {
  const auto& pse = options.pse_shift;
  if (!pse || options.pse_type > 1 || pse->dim() != 4 || pse->size(1) != 1 ||
      options.heads() == 1) {
    return pse;
  }
  return pse->expand({-1, options.heads().expect_int(), -1, -1}).contiguous();
}

void clear_padding(Fills& fills, const IntegerList& ends, const at::Tensor& gradient) {
  const int64_t rows = sum_of(ends);
  // A graph that updates lengths has other rows in every replay.
  if (!ends.empty() && ends.back() == 0 && gradient.size(0) > rows &&
      GivenWorkspace::current() == nullptr) {
    add_fill(fills, gradient.narrow(0, rows, gradient.size(0) - rows), 0);
  }
}

std::optional<at::Tensor> launched_mask(const char* op, const at::Tensor& query,
                                        const at::Tensor& key, const FlashAttentionOptions& options,
                                        const DenseLists& lists) {
  if (!options.atten_mask && options.masked()) {
    return compressed_mask(op, static_cast<SparseMode>(options.sparse_mode), query.options());
  }
  auto full = options;
  full.atten_mask = expanded_mask(op, query, key, options, lists);
  return mask_with_band(op, full, lists);
}

}  // namespace ascend_attn::aclnn
