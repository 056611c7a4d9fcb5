#include "cpu/common/dense_attention.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>

#include "core/error.h"
#include "core/pack_hints.h"
#include "core/sequence_lengths.h"
#include "core/symbolic.h"
#include "core/tensor_checks.h"

namespace ascend_attn::cpu {
namespace {

// Returns how far keys are ahead of queries at index 0. Without kv_start_idx, q_start_idx is
// ignored.
int64_t start_distance(const FlashAttentionOptions& options) {
  const auto key_start = options.first_of(options.kv_start_idx);
  return key_start ? *key_start - options.first_of(options.q_start_idx).value_or(0) : 0;
}

// Returns whether the mask keeps every column in [begin, end), that is, whether the bytes are zero.
bool keeps_all(const uint8_t* row, int64_t begin, int64_t end) {
  uint8_t all = 0;
  vectorized([row, begin, end, &all] {
    uint8_t any = 0;
    for (int64_t j = begin; j < end; ++j) {
      any |= row[j];
    }
    all = any;
  });
  return all == 0;
}

// Returns whether the mask keeps no column in [begin, end).
bool keeps_none(const uint8_t* row, int64_t begin, int64_t end) {
  uint8_t any = 0;
  vectorized([row, begin, end, &any] {
    uint8_t kept = 0;
    for (int64_t j = begin; j < end; ++j) {
      kept |= static_cast<uint8_t>(row[j] == 0);
    }
    any = kept;
  });
  return any == 0;
}

// Returns whether is_right(row pointer, batch, head, row) holds for every row of a mask of any
// rank.
template <typename IsRight>
bool all_rows(const at::Tensor& mask, const IsRight& is_right) {
  const auto dense = with_dense_rows(on_host(mask));
  auto rows = dense;
  while (rows.dim() < 4) {
    rows = rows.unsqueeze(0);
  }
  const auto* data = bytes_of(rows);
  const int64_t heads = rows.size(1);
  const int64_t queries = rows.size(2);
  std::atomic<bool> right{true};
  at::parallel_for(0, rows.size(0) * heads * queries, 128, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end && right.load(std::memory_order_relaxed); ++at) {
      const int64_t batch = at / (heads * queries);
      const int64_t head = at / queries % heads;
      const int64_t row = at % queries;
      if (!is_right(data + batch * rows.stride(0) + head * rows.stride(1) + row * rows.stride(2),
                    batch, head, row)) {
        right = false;
      }
    }
  });
  return right;
}

// Rejects unexpected values in a compressed mask: the device reads them, while the CPU applies the
// rule.
void check_compressed_mask(const char* op, const at::Tensor& mask, int64_t mode) {
  constexpr int64_t size = kCompressedMaskSize;
  const auto is_right = [](const uint8_t* row, int64_t, int64_t, int64_t at) {
    const int64_t kept = at < size ? at + 1 : size / 2;
    return keeps_all(row, 0, kept) && keeps_none(row, kept, size);
  };
  check_value(all_rows(mask, is_right), op, "atten_mask", "expected ",
              mask.size(-2) == size
                  ? "1 above the diagonal and 0 elsewhere, torch.triu(torch.ones(2048, 2048), 1),"
                  : "torch.triu(torch.ones(2048, 2048), 1) and below it 1024 rows of 1024 zeros "
                    "and 1024 ones",
              " for sparse_mode ", mode, ", got other values; True (1) masks a key out");
}

// A mask of the other polarity often masks every key, or of a triangle the diagonal. Most masks
// keep the first key of the first row: the others are then not read.
void warn_of_other_polarity(const char* op, const at::Tensor& mask) {
  const bool masks_first = mask.is_cpu() && mask.numel() > 0 && *bytes_of(mask) != 0;
  if (!masks_first) [[likely]] {
    return;
  }
  constexpr const char* kMeaning =
      ", as True masks a key out; pass ~mask for one where True keeps a key";
  const int64_t columns = mask.size(-1);
  const auto masks_all = [columns](const uint8_t* row, int64_t, int64_t, int64_t) {
    return keeps_none(row, 0, columns);
  };
  const auto masks_diagonal = [columns](const uint8_t* row, int64_t, int64_t, int64_t at) {
    return row[at] != 0 && keeps_all(row, at + 1, columns);
  };
  if (all_rows(mask, masks_all)) {
    TORCH_WARN_ONCE("ascend::", op, ": atten_mask: masks every key", kMeaning);
  } else if (columns > 1 && mask.size(-2) == columns && all_rows(mask, masks_diagonal)) {
    TORCH_WARN_ONCE("ascend::", op,
                    ": atten_mask: masks the key of each query and keeps all that come after it",
                    kMeaning);
  }
}

}  // namespace

DenseAttention::DenseAttention(Layout layout, int64_t heads, double scale, const at::Tensor& query,
                               const at::Tensor& key, const at::Tensor& value)
    : layout(layout), heads(heads), scale(scale) {
  const auto axes = axes_of(layout);
  size = axes.merged() ? query.size(-1) / heads : query.size(-1);
  key_heads = axes.merged() ? key.size(-1) / size : key.size(axes.heads);
  value_size = axes.merged() ? value.size(-1) / key_heads : value.size(-1);
  this->query = by_head(with_dense_rows(query), heads);
  this->key = by_head(with_dense_rows(key), key_heads);
  this->value = by_head(with_dense_rows(value), key_heads);
}

DenseAttention::DenseAttention(const char* op, const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const FlashAttentionOptions& options)
    : DenseAttention(options.layout.value(), options.heads().expect_int(), options.scale(), query,
                     key, value) {
  pse_type = options.pse_type;
  distance_shift = start_distance(options);
  keep_prob = options.keep_prob;
  read_sequences(options);
  if (options.pse_shift) {
    read_pse(op, options);
  }
  if (options.atten_mask) {
    read_mask(op, options);
  }
  if (options.drop_mask) {
    drop_mask = options.drop_mask->contiguous();
  }
}

DenseAttention::DenseAttention(const PromptFlashAttention& op)
    : DenseAttention(op.layout == Layout::BNSD_BSND ? Layout::BNSD : op.layout.value(),
                     op.heads().expect_int(), op.scale(), op.query, op.key, op.value) {
  const auto mode = static_cast<SparseMode>(op.sparse_mode);
  for (const auto& tokens :
       dense_sequences(layout, query.size(0), query.size(2), key.size(2),
                       op.actual_seq_lengths_query, op.actual_seq_lengths_key)) {
    add_sequence(tokens, op.masked(), mode, op.pre_tokens, op.next_tokens);
  }
  if (op.atten_mask) {
    read_mask_of_inference(op.name, *op.atten_mask, mode);
  }
}

void DenseAttention::add_sequence(const Sequence& tokens, bool masked, SparseMode mode,
                                  int64_t pre_tokens, int64_t next_tokens) {
  const KeptKeys all{tokens.keys};
  const auto kept = masked ? kept_keys(mode, tokens.queries, tokens.keys, pre_tokens, next_tokens,
                                       /*prefix=*/0, /*is_band=*/false)
                           : all;
  const auto index = static_cast<int64_t>(sequences.size());
  sequences.push_back({tokens, index, tokens.queries, tokens.keys, /*rows_before=*/0,
                       /*pairs_before=*/0, kept});
}

void DenseAttention::read_mask_of_inference(const char* op, const at::Tensor& given,
                                            SparseMode mode) {
  if (has_compressed_mask(mode)) {
    check_compressed_mask(op, given, static_cast<int64_t>(mode));
    return;
  }
  use_full_mask(op, given);
}

void DenseAttention::fill_padding(const at::Tensor& output, const at::Scalar& value,
                                  int64_t Sequence::* tokens) const {
  for (const auto& sequence : sequences) {
    const int64_t padding = output.size(2) - sequence.*tokens;
    if (padding > 0 && !axes_of(layout).packed()) {
      output[sequence.batch].narrow(1, sequence.*tokens, padding).fill_(value);
    }
  }
}

at::Tensor DenseAttention::by_head(Layout layout, const at::Tensor& tensor, int64_t heads) {
  const auto axes = axes_of(layout);
  if (axes.packed()) {
    return tensor.permute({axes.heads, axes.tokens, 2}).unsqueeze(0);
  }
  // The head size comes last in every layout.
  return (axes.merged() ? tensor.unflatten(-1, {heads, -1}) : tensor)
      .permute({axes.batch, axes.heads, axes.tokens, 3});
}

void DenseAttention::add(const SinkAndRopes& extra) {
  if (extra.sink) {
    sink = extra.sink->to(statistics_dtype(query)).contiguous();
  }
  if (!extra.query_rope) {
    return;
  }
  add_ropes(by_head(with_dense_rows(*extra.query_rope), heads),
            by_head(with_dense_rows(*extra.key_rope), key_heads));
}

void DenseAttention::add_ropes(const at::Tensor& of_query, const at::Tensor& of_key) {
  query_rope = of_query;
  key_rope = of_key;
  rope_size = query_rope.size(-1);
  size += rope_size;
}

void DenseAttention::read_sequences(const FlashAttentionOptions& options) {
  const bool packed = layout == Layout::TND;
  const bool empty = query.size(2) == 0 && key.size(2) == 0;
  const auto& query_lengths = options.actual_seq_lengths_query;
  const auto& key_lengths = options.actual_seq_lengths_key;
  if (packed && query_lengths.values().back() != 0) {
    warn_of_counts("flash_attention_score", query_lengths.values(), query.size(2));
  }
  int64_t rows = 0;
  int64_t pairs = 0;
  for (const auto& span : dense_sequences(layout, empty ? 0 : query.size(0), query.size(2),
                                          key.size(2), query_lengths, key_lengths)) {
    const auto index = static_cast<int64_t>(sequences.size());
    const int64_t query_room = packed ? span.queries : query.size(2);
    const int64_t key_room = packed ? span.keys : key.size(2);
    sequences.push_back({span, index, query_room, key_room, rows, pairs, {span.keys}});
    rows += query_room;
    pairs = saturated_sum(pairs, saturated_product(query_room, key_room));
  }
  if (!options.masked()) {
    return;
  }
  const auto mode = static_cast<SparseMode>(options.sparse_mode);
  const bool has_prefix = mode == SparseMode::prefix || mode == SparseMode::prefix_compressed;
  // Mode 7 has a band in the last non-empty sequence, mode 8 in the first.
  const auto filled = [](const DenseSequence& sequence) { return !sequence.empty(); };
  const auto first = std::find_if(sequences.begin(), sequences.end(), filled);
  const auto last = std::find_if(sequences.rbegin(), sequences.rend(), filled);
  const int64_t band = first == sequences.end()                  ? -1
                       : mode == SparseMode::band_left_up_causal ? first->index
                                                                 : last->index;
  for (auto& each : sequences) {
    each.kept = kept_keys(mode, each.queries, each.keys, options.pre_tokens, options.next_tokens,
                          has_prefix ? options.prefix.values()[each.index] : 0, each.index == band);
  }
}

void DenseAttention::read_pse(const char* op, const FlashAttentionOptions& options) {
  pse = with_dense_rows(*options.pse_shift);
  if (pse_type <= 1) {
    pse_address = PseAddress::of(pse, query, key, layout == Layout::TND, sequences);
  } else {
    check_value(on_host(pse).gt(0).all().item<bool>(), op, "pse_shift",
                "expected positive slopes, minus which times the distance is added, for pse_type ",
                pse_type, ", got others");
    pse_address.heads = heads;
    pse_address.batch_stride = pse.dim() == 2 && pse.size(0) > 1 ? pse.stride(0) : 0;
    pse_address.head_stride = 1;
  }
}

void DenseAttention::read_mask(const char* op, const FlashAttentionOptions& options) {
  const auto given = expanded(*options.atten_mask);
  const auto mode = static_cast<SparseMode>(options.sparse_mode);
  if (mode == SparseMode::prefix) {
    const auto follows_the_rule = [this](const uint8_t* row, int64_t batch, int64_t, int64_t at) {
      const auto& kept = sequences[batch].kept;
      const int64_t end = kept.end(at);
      return keeps_all(row, 0, end) && keeps_none(row, end, kept.keys);
    };
    check_value(all_rows(given, follows_the_rule), op, "atten_mask",
                "expected 0 where j < prefix or j <= i + Skv - Sq and 1 elsewhere for sparse_mode "
                "5, got other values; True (1) masks a key out");
    return;
  }
  if (has_compressed_mask(mode)) {
    check_compressed_mask(op, given, options.sparse_mode);
    return;
  }
  if (pse.defined() && pse_type <= 1 && pse_address.form == PseAddress::Form::compressed &&
      !sequences.empty()) {
    const auto is_causal = [this](const uint8_t* row, int64_t, int64_t, int64_t at) {
      const auto& kept = sequences[0].kept;
      return keeps_none(row, at + 1, kept.end(at));
    };
    check_value(all_rows(given, is_causal), op, "atten_mask",
                "expected every key behind the query to be masked out, because the pse_shift of "
                "1024 rows has no values there, got a mask that keeps some");
    for (auto& sequence : sequences) {
      sequence.kept.until = std::min<int64_t>(sequence.kept.until, 1);
    }
  }
  use_full_mask(op, given);
}

at::Tensor DenseAttention::expanded(const at::Tensor& mask) const {
  if (mask.dim() < 4 || (mask.size(2) != 1 && mask.size(3) != 1)) {
    return mask;
  }
  const bool packed = layout == Layout::TND;
  const int64_t queries = packed ? longest(sequences, &Sequence::queries) : query.size(2);
  const int64_t keys = packed ? longest(sequences, &Sequence::keys) : key.size(2);
  // Rows are read as they lie.
  const auto rows = mask.size(3) == 1 ? mask.expand({-1, -1, -1, keys}).contiguous() : mask;
  return rows.size(2) == 1 ? rows.expand({-1, -1, queries, -1}) : rows;
}

void DenseAttention::use_full_mask(const char* op, const at::Tensor& given) {
  mask = with_dense_rows(given);
  if (mask.numel() == 0) {
    return;  // Nothing will be read, and there may be no sequence to give it an axis for.
  }
  // A mask may be larger than the keys of a call, and its rows may repeat.
  const auto used = [&](int64_t axis, int64_t Sequence::* tokens) {
    const auto size = mask.size(axis);
    return layout == Layout::TND ? size : std::min(size, longest(sequences, tokens));
  };
  warn_of_other_polarity(
      op,
      mask.narrow(-2, 0, used(-2, &Sequence::queries)).narrow(-1, 0, used(-1, &Sequence::keys)));
  if (layout == Layout::TND && mask.dim() == 2) {
    // With a single sequence that has tokens the two forms are one.
    mask_of_all_tokens = mask.size(0) != longest(sequences, &Sequence::queries) ||
                         mask.size(1) != longest(sequences, &Sequence::keys);
  }
  if (mask.dim() == 3) {
    mask = mask.unsqueeze(1);
  }
  while (mask.dim() < 4) {
    mask = mask.unsqueeze(0);
  }
  mask = mask.expand({static_cast<int64_t>(sequences.size()), heads, mask.size(2), mask.size(3)});
}

PseAddress PseAddress::of(const at::Tensor& pse, const at::Tensor& query, const at::Tensor& key,
                          bool is_packed, const std::vector<DenseSequence>& sequences) {
  PseAddress address;
  address.heads = query.size(1);
  if (is_packed && pse.dim() == 1) {
    const int64_t pairs = sequences.empty() ? 0
                                            : sequences.back().pairs_before +
                                                  sequences.back().queries * sequences.back().keys;
    // If both forms have the same number of elements, it is the full one.
    address.form = pse.numel() == address.heads * pairs ? Form::packed : Form::packed_per_key;
    return address;
  }
  address.form = is_packed || is_compressed_pse(pse, query.size(2), key.size(2)) ? Form::compressed
                                                                                 : Form::strided;
  address.batch_stride = pse.size(0) == 1 ? 0 : pse.stride(0);
  address.head_stride = pse.size(1) == 1 ? 0 : pse.stride(1);
  address.query_stride = pse.size(2) == 1 ? 0 : pse.stride(2);
  return address;
}

int64_t PseAddress::row(const DenseSequence& sequence, int64_t head, int64_t query) const {
  const int64_t of_head = sequence.index * batch_stride + head * head_stride;
  switch (form) {
    case Form::strided:
      return of_head + query * query_stride;
    case Form::compressed: {
      // Only the last rows are stored; an earlier row reads a stored row at the same distance.
      const int64_t first = sequence.queries - kCompressedPseRows;
      const int64_t row = query >= first ? query - first : query % kCompressedPseRows;
      return of_head + row * query_stride + (first + row - query);
    }
    case Form::packed:
      return heads * sequence.pairs_before + (head * sequence.queries + query) * sequence.keys;
    case Form::packed_per_key:
      return heads * sequence.key_begin + head * sequence.keys;
  }
  return 0;
}

}  // namespace ascend_attn::cpu
