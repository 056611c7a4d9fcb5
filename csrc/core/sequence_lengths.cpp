#include "core/sequence_lengths.h"

#include <algorithm>

#include "core/error.h"
#include "core/pack_hints.h"
#include "core/symbolic.h"
#include "core/tensor_checks.h"

namespace ascend_attn {
namespace {

constexpr const char* kQueryLengths = "actual_seq_lengths_query";

void check_length(std::string_view op, std::string_view argument, Layout layout, size_t batch,
                  int64_t length, int64_t previous, int64_t tokens, std::string_view hint = {}) {
  if (layout == Layout::TND) {
    check_value(length >= previous, op, argument,
                "expected cumulative sequence lengths that never decrease, got ", length, " after ",
                previous, " at ", batch, hint);
    check_value(length <= tokens, op, argument,
                "expected cumulative sequence lengths of at most T = ", tokens, ", got ", length,
                " at ", batch);
  } else {
    check_value(length >= 0 && length <= tokens, op, argument, "expected counts in 0..S = ", tokens,
                ", got ", length, " at ", batch);
  }
}

std::vector<int64_t> read_lengths(std::string_view op, std::string_view argument, Layout layout,
                                  const std::optional<at::Tensor>& lengths, int64_t tokens) {
  std::vector<int64_t> values;
  if (lengths) {
    const auto dense = on_host(*lengths).contiguous();
    const auto* data = dense.const_data_ptr<int32_t>();
    values.assign(data, data + dense.numel());
    const auto hint = hint_for_counts(values, tokens);
    for (size_t batch = 0; batch < values.size(); ++batch) {
      check_length(op, argument, layout, batch, values[batch], batch ? values[batch - 1] : 0,
                   tokens, hint);
    }
  }
  return values;
}

std::vector<int64_t> read_lengths(std::string_view, std::string_view, Layout,
                                  at::OptionalSymIntArrayRef lengths, int64_t) {
  return lengths ? values_of(*lengths) : std::vector<int64_t>();
}

template <typename Lengths>
std::vector<Sequence> make_sequences(std::string_view op, Layout layout, const at::Tensor& query,
                                     const at::Tensor& key, const Lengths& lengths_query,
                                     const Lengths& lengths_key,
                                     std::string_view key_lengths = kKeyLengths) {
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

}  // namespace

void check_sequence_lengths(std::string_view op, std::string_view argument, Layout layout,
                            c10::SymIntArrayRef lengths, const c10::SymInt& tokens) {
  const auto known_tokens = tokens.maybe_as_int();
  int64_t previous = 0;
  for (size_t batch = 0; batch < lengths.size(); ++batch) {
    const auto length = lengths[batch].maybe_as_int();
    if (!length || !known_tokens) {
      return;
    }
    check_length(op, argument, layout, batch, *length, previous, *known_tokens,
                 *length < previous ? hint_for_counts(lengths, tokens) : std::string_view());
    previous = *length;
  }
}

void check_actual_lengths(std::string_view op, std::string_view argument,
                          at::OptionalSymIntArrayRef lengths, const c10::SymInt& batch,
                          const c10::SymInt& tokens) {
  if (!given(lengths)) {
    return;
  }
  const auto count = static_cast<int64_t>(lengths->size());
  check_value(count == 1 || at_most(batch, count), op, argument,
              "expected one length, or at least one per batch, ", batch, ", got ", count);
  const int64_t read = std::min(count, batch.maybe_as_int().value_or(count));
  check_sequence_lengths(op, argument, Layout::BSND, lengths->slice(0, read), tokens);
}

c10::SymInt actual_length(at::OptionalSymIntArrayRef lengths, int64_t batch,
                          const c10::SymInt& tokens) {
  return !given(lengths) ? tokens : (*lengths)[lengths->size() == 1 ? 0 : batch];
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

int64_t pair_count(c10::ArrayRef<Sequence> sequences) {
  int64_t pairs = 0;
  for (const auto& sequence : sequences) {
    pairs = saturated_sum(pairs, saturated_product(sequence.queries, sequence.keys));
  }
  return pairs;
}

std::vector<int64_t> values_of(c10::SymIntArrayRef list) {
  std::vector<int64_t> values;
  for (const auto& each : list) {
    values.push_back(each.expect_int());
  }
  return values;
}

std::optional<std::vector<int64_t>> known_values(c10::SymIntArrayRef list) {
  std::vector<int64_t> values;
  for (const auto& each : list) {
    const auto value = each.maybe_as_int();
    if (!value) {
      return std::nullopt;
    }
    values.push_back(*value);
  }
  return values;
}

std::vector<Sequence> read_sequences(std::string_view op, Layout layout, const at::Tensor& query,
                                     const at::Tensor& key,
                                     const std::optional<at::Tensor>& lengths_query,
                                     const std::optional<at::Tensor>& lengths_key,
                                     std::string_view key_lengths) {
  return make_sequences(op, layout, query, key, lengths_query, lengths_key, key_lengths);
}

std::vector<Sequence> read_sequences(std::string_view op, Layout layout, const at::Tensor& query,
                                     const at::Tensor& key,
                                     at::OptionalSymIntArrayRef lengths_query,
                                     at::OptionalSymIntArrayRef lengths_key) {
  return make_sequences(op, layout, query, key, lengths_query, lengths_key);
}

std::vector<Sequence> read_paged_sequences(std::string_view op, Layout layout,
                                           const at::Tensor& query, const at::Tensor& key,
                                           const at::Tensor& block_table,
                                           const std::optional<at::Tensor>& lengths_query,
                                           const at::Tensor& lengths_key,
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
