#include "npu/padded_batch.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "core/error.h"
#include "core/sparse_mode.h"
#include "npu/aclnn/product.h"
#include "npu/kernel.h"
#include "npu/sink_and_ropes.h"
#include "ops/flash_attention_score_rules.h"

namespace ascend_attn::aclnn {
namespace {

constexpr int64_t kBitsPerByte = 8;

}  // namespace

PaddedBatch::PaddedBatch(const char* op, const at::Tensor& query, const at::Tensor& key,
                         const FlashAttentionOptions& options)
    : layout_(options.layout.value()),
      query_heads_(options.heads().expect_int()),
      key_heads_(key_heads_of(query, key, layout_, query_heads_)) {
  check_implemented(GivenWorkspace::current() == nullptr, op, "actual_seq_lengths_query",
                    "expected layout TND in a call whose lengths a graph updates, got ",
                    options.layout.text());
  const auto axes = axes_of(layout_);
  query_room_ = query.size(axes.tokens);
  key_room_ = key.size(axes.tokens);
  sequences_ = dense_sequences(layout_, query.size(axes.batch), query_room_, key_room_,
                               options.actual_seq_lengths_query, options.actual_seq_lengths_key);
  gaps_ = may_have_gaps(options);
  // Ascend 950 computes other sequences wrong beside queries without keys, whose results are zero.
  for (auto& sequence : sequences_) {
    if (!gaps_ && sequence.keys == 0) {
      sequence.queries = 0;
    }
  }
}

bool PaddedBatch::complete() const {
  return std::ranges::all_of(sequences_, [&](const Sequence& sequence) {
    return sequence.queries == query_room_ && sequence.keys == key_room_;
  });
}

// The kernel of Ascend 950 corrupts sequences behind an empty one. An argument with a row for each
// sequence would need more rows.
bool PaddedBatch::may_have_gaps(const FlashAttentionOptions& options) const {
  constexpr size_t kSequencesPerBatch = 3;
  static const bool corrupts = runs_on(k950);
  const bool in_order = layout_ == Layout::BSND || layout_ == Layout::BSH;
  const bool biased = options.pse_shift && options.pse_type <= 1;
  return in_order && !corrupts && !biased && !options.drop_mask && !has_row_per_sequence(options) &&
         options.sparse_mode != static_cast<int64_t>(SparseMode::prefix_compressed) &&
         sequences_.size() * kSequencesPerBatch <= static_cast<size_t>(kMostSequences);
}

at::Tensor PaddedBatch::as_bsnd(TokensOf tokens, const at::Tensor& tensor) const {
  return as_bnsd(tensor, layout_, tokens == kQueries ? query_heads_ : key_heads_).transpose(1, 2);
}

at::Tensor PaddedBatch::rows(TokensOf tokens, const at::Tensor& padded) const {
  const auto batches = as_bsnd(tokens, padded);
  if (gaps_) {
    return batches.reshape({-1, batches.size(2), batches.size(3)});
  }
  std::vector<at::Tensor> parts;
  for (const auto& sequence : sequences_) {
    parts.push_back(batches[sequence.batch].narrow(0, 0, sequence.*tokens));
  }
  return at::cat(parts);
}

void PaddedBatch::store_rows(TokensOf tokens, const at::Tensor& packed,
                             const at::Tensor& to) const {
  const auto batches = as_bsnd(tokens, to);
  int64_t begin = 0;
  for (const auto& sequence : sequences_) {
    const int64_t count = sequence.*tokens;
    const auto batch = batches[sequence.batch];
    if (!gaps_) {
      batch.narrow(0, 0, count).copy_(packed.narrow(0, begin, count));
      begin += count;
    }
    if (count < batch.size(0)) {
      batch.narrow(0, count, batch.size(0) - count).zero_();
    }
  }
}

bool PaddedBatch::has_scores() const { return !std::ranges::all_of(sequences_, &Sequence::empty); }

int64_t PaddedBatch::tokens_of_pack(TokensOf tokens) const {
  int64_t sum = 0;
  for (const auto& sequence : sequences_) {
    sum += gaps_ ? (tokens == kQueries ? query_room_ : key_room_) : sequence.*tokens;
  }
  return sum;
}

namespace {

TokensOf tokens_of(PaddedBatch::Axes axes) {
  return axes == PaddedBatch::Axes::keys ? kKeys : kQueries;
}

// Whether an output has rows. Gradients of ropes that a call lacks have none.
bool has_rows(const at::Tensor& output, PaddedBatch::Axes axes) {
  return axes != PaddedBatch::Axes::none && output.defined() && output.dim() > 1;
}

}  // namespace

at::Tensor PaddedBatch::target(const at::Tensor& padded, Axes axes) const {
  if (!has_rows(padded, axes)) {
    return padded;
  }
  const auto count = tokens_of_pack(tokens_of(axes));
  if (axes == Axes::statistics) {
    return at::empty({count, query_heads_, kStatisticsLanes}, padded.options());
  }
  const auto batches = as_bsnd(tokens_of(axes), padded);
  const auto sizes = {count, batches.size(2), batches.size(3)};
  return gaps_ ? batches.view(sizes) : at::empty(sizes, padded.options());
}

void PaddedBatch::store(const at::Tensor& packed, const at::Tensor& to, Axes axes) const {
  if (!has_rows(to, axes)) {
  } else if (axes == Axes::statistics) {
    store_statistics(packed, to);
  } else {
    store_rows(tokens_of(axes), packed, to);
  }
}

// In a pack, statistics are (N, Sq, 8) of one sequence after another.
at::Tensor PaddedBatch::statistics(const at::Tensor& padded) const {
  std::vector<at::Tensor> parts;
  for (const auto& sequence : sequences_) {
    const auto batch = padded[sequence.batch];
    parts.push_back(batch.narrow(1, 0, sequence.queries).reshape({-1, kStatisticsLanes}));
    if (gaps_) {
      parts.push_back(batch.narrow(1, sequence.queries, query_room_ - sequence.queries)
                          .reshape({-1, kStatisticsLanes}));
    }
  }
  return at::cat(parts).view({-1, query_heads_, kStatisticsLanes});
}

void PaddedBatch::store_statistics(const at::Tensor& packed, const at::Tensor& to) const {
  const auto rows = packed.view({-1, kStatisticsLanes});
  int64_t begin = 0;
  for (const auto& sequence : sequences_) {
    const int64_t count = sequence.queries;
    const auto batch = to[sequence.batch];
    batch.narrow(1, 0, count)
        .copy_(rows.narrow(0, begin, count * query_heads_)
                   .view({query_heads_, count, kStatisticsLanes}));
    if (count < query_room_) {
      batch.narrow(1, count, query_room_ - count).zero_();
    }
    begin += query_heads_ * (gaps_ ? query_room_ : count);
  }
}

FlashAttentionOptions PaddedBatch::options(const FlashAttentionOptions& given) const {
  auto packed = given;
  packed.layout = LayoutArgument("TND");
  std::vector<int64_t> query_ends, key_ends;
  const auto add = [&](int64_t queries, int64_t keys) {
    query_ends.push_back((query_ends.empty() ? 0 : query_ends.back()) + queries);
    key_ends.push_back((key_ends.empty() ? 0 : key_ends.back()) + keys);
  };
  for (const auto& sequence : sequences_) {
    add(sequence.queries, sequence.keys);
    if (gaps_ && sequence.queries < query_room_) {
      add(query_room_ - sequence.queries, 0);
    }
    if (gaps_ && sequence.keys < key_room_) {
      add(0, key_room_ - sequence.keys);
    }
  }
  packed.actual_seq_lengths_query = query_ends;
  packed.actual_seq_lengths_key = key_ends;
  packed.atten_mask = mask(given);
  packed.pse_shift = bias(given);
  packed.drop_mask = drop_mask(given);
  return packed;
}

// A full mask, up to the longest sequence.
std::optional<at::Tensor> PaddedBatch::mask(const FlashAttentionOptions& given) const {
  const auto mode = static_cast<SparseMode>(given.sparse_mode);
  if (!given.atten_mask || has_compressed_mask(mode)) {
    return given.atten_mask;
  }
  auto sizes = given.atten_mask->sizes().vec();
  sizes.end()[-2] = query_room_;
  sizes.end()[-1] = key_room_;
  auto queries = longest(sequences_, &Sequence::queries);
  auto keys = longest(sequences_, &Sequence::keys);
  for (const auto& sequence : sequences_) {
    queries = std::max(queries, gaps_ ? query_room_ - sequence.queries : 0);
    keys = std::max(keys, gaps_ ? key_room_ - sequence.keys : 0);
  }
  return given.atten_mask->expand(sizes).narrow(-2, 0, queries).narrow(-1, 0, keys);
}

std::optional<at::Tensor> PaddedBatch::bias(const FlashAttentionOptions& given) const {
  if (!given.pse_shift || given.pse_type > 1) {
    return given.pse_shift;
  }
  const auto& pse = *given.pse_shift;
  int64_t pairs = 0;
  int64_t keys = 0;
  for (const auto& sequence : sequences_) {
    pairs += sequence.queries * sequence.keys;
    keys += sequence.keys;
  }
  // By its size, a value for each key would be taken for one of each score.
  const bool per_key = pse.size(2) == 1 && pairs != keys;
  const auto full = pse.expand({static_cast<int64_t>(sequences_.size()), query_heads_,
                                per_key ? 1 : query_room_, key_room_});
  std::vector<at::Tensor> parts;
  for (const auto& sequence : sequences_) {
    parts.push_back(full[sequence.batch]
                        .narrow(1, 0, per_key ? 1 : sequence.queries)
                        .narrow(2, 0, sequence.keys)
                        .flatten());
  }
  return at::cat(parts);
}

// The bits of (B, N, Sq, Skv), of which a pack has those of its scores.
std::optional<at::Tensor> PaddedBatch::drop_mask(const FlashAttentionOptions& given) const {
  if (!given.drop_mask) {
    return std::nullopt;
  }
  const auto place = at::arange(kBitsPerByte, given.drop_mask->options().dtype(at::kInt));
  const auto bytes = given.drop_mask->flatten().to(at::kInt).unsqueeze(1);
  const auto bits = bytes.bitwise_right_shift(place).bitwise_and(1).to(at::kByte).flatten();
  const int64_t of_batch = query_heads_ * query_room_ * key_room_;
  std::vector<at::Tensor> parts;
  for (const auto& sequence : sequences_) {
    parts.push_back(bits.narrow(0, sequence.batch * of_batch, of_batch)
                        .view({query_heads_, query_room_, key_room_})
                        .narrow(1, 0, sequence.queries)
                        .narrow(2, 0, sequence.keys)
                        .flatten());
  }
  const auto kept = at::cat(parts);
  const int64_t padding = (kBitsPerByte - kept.size(0) % kBitsPerByte) % kBitsPerByte;
  return at::constant_pad_nd(kept, {0, padding})
      .view({-1, kBitsPerByte})
      .to(at::kInt)
      .bitwise_left_shift(place)
      .sum(1)
      .to(at::kByte);
}

}  // namespace ascend_attn::aclnn
