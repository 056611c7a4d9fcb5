#include "core/sequence_lengths.h"

#include <algorithm>

#include "core/error.h"
#include "core/pack_hints.h"
#include "core/symbolic.h"
#include "core/tensor_checks.h"

namespace ascend_attn {
namespace {

void check_length(std::string_view op, std::string_view argument, Layout layout, size_t batch,
                  int64_t length, int64_t previous, int64_t tokens, c10::ArrayRef<int64_t> values) {
  if (layout == Layout::TND) {
    if (length < previous) [[unlikely]] {
      raise(Violation::value, op, argument,
            c10::str("expected cumulative sequence lengths that never decrease, got ", length,
                     " after ", previous, " at ", batch, hint_for_counts(values, tokens)));
    }
    check_value(length <= tokens, op, argument,
                "expected cumulative sequence lengths of at most T = ", tokens, ", got ", length,
                " at ", batch);
  } else {
    check_value(length >= 0 && length <= tokens, op, argument, "expected counts in 0..S = ", tokens,
                ", got ", length, " at ", batch);
  }
}

// Returns the values, checked.
c10::ArrayRef<int64_t> read_lengths(std::string_view op, std::string_view argument, Layout layout,
                                    const Lengths& lengths, int64_t tokens) {
  check_sequence_lengths(op, argument, layout, lengths, tokens);
  return lengths.values();
}

}  // namespace

void check_sequence_lengths(std::string_view op, std::string_view argument, Layout layout,
                            c10::ArrayRef<int64_t> lengths, const c10::SymInt& tokens) {
  const auto known_tokens = tokens.maybe_as_int();
  int64_t previous = 0;
  for (size_t batch = 0; known_tokens && batch < lengths.size(); ++batch) {
    check_length(op, argument, layout, batch, lengths[batch], previous, *known_tokens, lengths);
    previous = lengths[batch];
  }
}

void check_sequence_lengths(std::string_view op, std::string_view argument, Layout layout,
                            const Lengths& lengths, const c10::SymInt& tokens) {
  if (lengths.known()) {
    check_sequence_lengths(op, argument, layout, lengths.values(), tokens);
  }
}

void check_actual_lengths(std::string_view op, std::string_view argument, const Lengths& lengths,
                          const c10::SymInt& batch, const c10::SymInt& tokens) {
  if (!lengths.given()) {
    return;
  }
  const auto count = lengths.count();
  check_value(known_equal(count, 1) || at_most(batch, count), op, argument,
              "expected one length, or at least one per batch, ", batch, ", got ", count);
  const auto known_batch = batch.maybe_as_int();
  const auto known_tokens = tokens.maybe_as_int();
  if (!lengths.known() || !known_batch || !known_tokens) {
    return;
  }
  const auto values = lengths.values();
  for (size_t b = 0; b < values.size() && static_cast<int64_t>(b) < *known_batch; ++b) {
    check_length(op, argument, Layout::BSND, b, values[b], 0, *known_tokens, values);
  }
}

int64_t actual_length(const Lengths& lengths, int64_t batch, int64_t tokens) {
  const auto values = lengths.values();
  return values.empty() ? tokens : values[values.size() == 1 ? 0 : batch];
}

std::vector<Sequence> packed_sequences(c10::ArrayRef<int64_t> query_ends,
                                       c10::ArrayRef<int64_t> key_ends) {
  std::vector<Sequence> sequences;
  Sequence next;
  for (size_t b = 0; b < query_ends.size(); ++b) {
    next.queries = std::max<int64_t>(query_ends[b] - next.query_begin, 0);
    next.keys = std::max<int64_t>(key_ends[b] - next.key_begin, 0);
    sequences.push_back(next);
    next.query_begin += next.queries;
    next.key_begin += next.keys;
  }
  return sequences;
}

std::vector<Sequence> dense_sequences(Layout layout, int64_t batches, int64_t queries, int64_t keys,
                                      const Lengths& query_lengths, const Lengths& key_lengths,
                                      bool paged) {
  const auto query_values = query_lengths.values();
  const auto key_values = key_lengths.values();
  if (!axes_of(layout).packed()) {
    std::vector<Sequence> sequences(batches);
    for (int64_t b = 0; b < batches; ++b) {
      sequences[b] = {.queries = actual_length(query_lengths, b, queries),
                      .keys = actual_length(key_lengths, b, keys),
                      .batch = b};
    }
    return sequences;
  }
  auto sequences = packed_sequences(query_values, paged ? query_values : key_values);
  for (size_t b = 0; paged && b < sequences.size(); ++b) {
    sequences[b].key_begin = 0;
    sequences[b].keys = key_values[b];
  }
  return sequences;
}

int64_t longest(c10::ArrayRef<int64_t> ends) {
  return longest(packed_sequences(ends, ends), &Sequence::queries);
}

int64_t pair_count(c10::ArrayRef<Sequence> sequences) {
  int64_t pairs = 0;
  for (const auto& sequence : sequences) {
    pairs = saturated_sum(pairs, saturated_product(sequence.queries, sequence.keys));
  }
  return pairs;
}

std::vector<Sequence> read_sequences(std::string_view op, Layout layout, const at::Tensor& query,
                                     const at::Tensor& key, const Lengths& lengths_query,
                                     const Lengths& lengths_key, std::string_view key_lengths) {
  const auto axes = axes_of(layout);
  const auto query_tokens = query.size(axes.tokens);
  const auto key_tokens = key.size(axes.tokens);
  const auto query_values = read_lengths(op, kQueryLengths, layout, lengths_query, query_tokens);
  const auto key_values = read_lengths(op, key_lengths, layout, lengths_key, key_tokens);
  if (axes.packed()) {
    warn_of_counts(op, query_values, query_tokens);
    warn_of_counts(op, key_values, key_tokens);
    return packed_sequences(query_values, key_values);
  }
  std::vector<Sequence> sequences;
  if (query_tokens == 0 && key_tokens == 0) {
    return sequences;  // of however many batches
  }
  for (int64_t b = 0; b < query.size(axes.batch); ++b) {
    sequences.push_back({b * query_tokens, lengths_query ? query_values[b] : query_tokens,
                         b * key_tokens, lengths_key ? key_values[b] : key_tokens, b});
  }
  return sequences;
}

std::vector<Sequence> read_paged_sequences(std::string_view op, Layout layout,
                                           const at::Tensor& query, const at::Tensor& key,
                                           const at::Tensor& block_table,
                                           const Lengths& lengths_query, const Lengths& lengths_key,
                                           std::string_view key_lengths) {
  const auto axes = axes_of(layout);
  const auto query_tokens = query.size(axes.tokens);
  const auto query_values = read_lengths(op, kQueryLengths, layout, lengths_query, query_tokens);
  const auto slots = saturated_product(block_table.size(1), key.size(1));
  const auto key_values = read_lengths(op, key_lengths, Layout::BSND, lengths_key, slots);
  std::vector<Sequence> sequences;
  int64_t query_begin = 0;
  for (size_t b = 0; b < key_values.size(); ++b) {
    const auto batch = static_cast<int64_t>(b);
    const auto queries = axes.packed()   ? query_values[b] - query_begin
                         : lengths_query ? query_values[b]
                                         : query_tokens;
    sequences.push_back({query_begin, queries, 0, key_values[b], batch});
    query_begin += axes.packed() ? queries : query_tokens;
  }
  return sequences;
}

}  // namespace ascend_attn
