#include "ops/sparse_lightning_indexer_grad_kl_loss.h"

#include <algorithm>
#include <string_view>

#include "core/error.h"
#include "core/pack_hints.h"
#include "core/sequence_lengths.h"
#include "ops/sparse_rules.h"

namespace ascend_attn {
namespace {

constexpr Rule kLossWeightsOf8_5 = weights_like_query(kA2A3.before(Cann::v9_0));
constexpr Rule kKeysCoverQueries{
    "query", "at most as many query tokens as key tokens, in all and in every sequence"};
constexpr Rule kNoPadding{"actual_seq_lengths_query", "the last cumulative lengths to be T1 and T2",
                          kA2A3.before(Cann::v9_1)};
constexpr Rule kNoPaddingOn950{"actual_seq_lengths_query",
                               "the last cumulative lengths to be T1 and T2", k950};
constexpr Rule kHeadPairs{"query_index", "Nidx 24 with N1 48, and neither without the other", k950};

// Returns a hint for a selection that is wider than that of common indexers: the keys of its tail
// are not the indexer's choice.
std::string_view hint_for_tail(const c10::SymInt& count) {
  constexpr int64_t kIndexerCount = 2048;
  return count.maybe_as_int().value_or(0) > kIndexerCount
             ? "; for a selection with a tail of recent keys, pass the indexer's own K (2048) to "
               "the loss"
             : "";
}

void check_keys_cover_queries(const DeviceLimits& device_limits, const c10::SymInt& queries,
                              const c10::SymInt& keys) {
  const auto query_count = queries.maybe_as_int();
  const auto key_count = keys.maybe_as_int();
  device_limits.rule(kKeysCoverQueries, !query_count || !key_count || *query_count <= *key_count,
                     queries, " query tokens and ", keys, " key tokens");
}

// Checks the number of tokens of one batch or sequence.
void check_tokens(const DeviceLimits& device_limits, const c10::SymInt& queries,
                  const c10::SymInt& keys) {
  device_limits.size("query", "S1", queries);
  device_limits.size("key", "S2", keys);
  check_keys_cover_queries(device_limits, queries, keys);
}

// Checks every batch by its own lengths: a padded batch reaches the device without its padding.
void check_padded(const DeviceLimits& device_limits, const at::Tensor& query, const at::Tensor& key,
                  const Lengths& query_lengths, const Lengths& key_lengths) {
  if (!query_lengths && !key_lengths) {
    check_tokens(device_limits, query.sym_size(1), key.sym_size(1));
    return;
  }
  const auto queries = query.sym_size(1).maybe_as_int();
  const auto keys = key.sym_size(1).maybe_as_int();
  const auto batches = std::max(query_lengths.values().size(), key_lengths.values().size());
  for (size_t batch = 0; queries && keys && batch < batches; ++batch) {
    check_tokens(device_limits, actual_length(query_lengths, batch, *queries),
                 actual_length(key_lengths, batch, *keys));
  }
}

// Checks what the device wants of packed sequences.
void check_packed(const DeviceLimits& device_limits, const at::Tensor& query, const at::Tensor& key,
                  c10::ArrayRef<int64_t> query_ends, c10::ArrayRef<int64_t> key_ends) {
  check_keys_cover_queries(device_limits, query.sym_size(0), key.sym_size(0));
  for (const auto& sequence : packed_sequences(query_ends, key_ends)) {
    check_tokens(device_limits, sequence.queries, sequence.keys);
  }
  const auto ends_at = [](c10::ArrayRef<int64_t> ends, const c10::SymInt& tokens) {
    const auto known = tokens.maybe_as_int();
    return !known || ends.empty() || ends.back() == *known;
  };
  const bool dense = ends_at(query_ends, query.sym_size(0)) && ends_at(key_ends, key.sym_size(0));
  for (const auto& rule : {kNoPadding, kNoPaddingOn950}) {
    device_limits.rule(rule, dense, query_ends.back(), " of ", query.sym_size(0), " and ",
                       key_ends.back(), " of ", key.sym_size(0),
                       hint_for_counts(query_ends, query.sym_size(0)));
  }
}

}  // namespace

const OperatorLimits SparseLightningIndexerGradKLLoss::limits{
    name,
    functions,
    sparse_dtypes(),
    {{"S1",
      "query tokens per sequence",
      {.min = 0, .max = 32 * 1024},
      kAllDevices.since(Cann::v9_0)},
     {"S2",
      "key tokens per sequence",
      {.min = 0, .max = 1024 * 1024},
      kAllDevices.since(Cann::v9_0)},
     {"N1", "query heads", {.one_of = {64, 128}}, kA2A3.before(Cann::v9_0)},
     {"N1", "query heads", {.one_of = {32, 64, 128}}, kA2A3},
     {"N1", "query heads", {.one_of = {32, 48, 64, 128}}, k950},
     kHeadDim,
     kRopeDim,
     {"Nidx", "query heads of the indexer", {.one_of = {8, 16, 32, 64}}, kA2A3},
     {"Nidx", "query heads of the indexer", {.one_of = {8, 16, 24, 32, 64}}, k950},
     kIndexDim,
     {"K", "selected keys per token", {.one_of = {2048}}, kA2A3.before(Cann::v9_0)},
     {"K", "selected keys per token", {.min = 1024, .max = 8192, .multiple_of = 1024}}},
    {kNotEmpty, kLossWeightsOf8_5, kKeysCoverQueries, kNoPadding, kNoPaddingOn950, kHeadPairs}};

SparseLightningIndexerGradKLLoss::Outputs SparseLightningIndexerGradKLLoss::check_and_allocate()
    const {
  const SparseRules rules(limits, layout, {"query", query}, {"key", key});
  rules.check_same_dtype({"query_index", query_index});
  rules.check_same_dtype({"key_index", key_index});
  check_value(query_index.dim() == query.dim(), name, "query_index", "expected rank ", query.dim(),
              " for layout ", layout.text(), ", got shape ", query_index.sym_sizes());
  const auto index_heads = query_index.sym_size(-2);
  const auto index_size = query_index.sym_size(-1);
  rules.check_like_query({"query_index", query_index}, index_heads, index_size);
  rules.check_like_key({"key_index", key_index}, index_size);
  rules.check_weights({"weights", weights}, index_heads);
  rules.check_sparse_indices({"sparse_indices", sparse_indices});
  rules.check_statistics({"softmax_max", softmax_max});
  rules.check_statistics({"softmax_sum", softmax_sum});
  rules.check_ropes({"query_rope", query_rope}, {"key_rope", key_rope});
  rules.check_lengths(actual_seq_lengths_query, actual_seq_lengths_key);
  const auto layout_of_call = rules.layout();
  check_sequence_lengths(name, "actual_seq_lengths_query", layout_of_call, actual_seq_lengths_query,
                         query.sym_size(-3));
  check_sequence_lengths(name, "actual_seq_lengths_key", layout_of_call, actual_seq_lengths_key,
                         key.sym_size(-3));
  if (token_weight) {
    rules.check_token_weight({"token_weight", *token_weight});
  }
  rules.check_sparse_mode(sparse_mode, {3});
  check_scale_value(name, scale_value);
  // The target is the mean of their attention.
  check_value(rules.heads().maybe_as_int() != 0, name, "query",
              "expected at least one head, got shape ", query.sym_sizes());

  if (const auto& device_limits = rules.limits()) {
    device_limits.size("query", "N1", rules.heads());
    device_limits.size("query", "D", rules.head_size());
    device_limits.size("query_index", "Nidx", index_heads);
    device_limits.size("query_index", "Didx", index_size);
    device_limits.rule(kHeadPairs,
                       !rules.heads().maybe_as_int() || !index_heads.maybe_as_int() ||
                           (rules.heads() == 48) == (index_heads == 24),
                       "N1 ", rules.heads(), " and Nidx ", index_heads);
    const auto count = sparse_indices.sym_size(-1);
    device_limits.size("sparse_indices", "K", count, hint_for_tail(count));
    device_limits.rule(kLossWeightsOf8_5, weights.dtype() == query.dtype(),
                       dtype_name(weights.scalar_type()));
    if (!actual_seq_lengths_query.known() || !actual_seq_lengths_key.known()) {
      // Fake tensors: the call is checked when it runs.
    } else if (layout_of_call == Layout::TND) {
      check_packed(device_limits, query, key, actual_seq_lengths_query.values(),
                   actual_seq_lengths_key.values());
    } else {
      check_padded(device_limits, query, key, actual_seq_lengths_query, actual_seq_lengths_key);
    }
  }
  return {new_like(query_index), new_like(key_index), new_like(weights),
          new_tensor({1}, softmax_max.options())};
}

}  // namespace ascend_attn
