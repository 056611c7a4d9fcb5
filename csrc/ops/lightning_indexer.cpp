#include "ops/lightning_indexer.h"

#include "core/error.h"
#include "ops/sparse_rules.h"

namespace ascend_attn {
namespace {

constexpr Rule kWeightsOf8_5 = weights_like_query(kA2A3.before(Cann::v9_0));
constexpr Rule kWeightsOf950 = weights_like_query(k950);
constexpr Rule kGradWeights = weights_like_query(kAllDevices);
// Compressed keys: CANN 9.1 has them on A2 and A3 alone.
constexpr Rule kCompressedWeights{"weights", "float32 where cmp_ratio is above 1", kAllDevices,
                                  Violation::type};
constexpr Rule kCompressedHeads{"query", "8 to 64 heads (Nidx) where cmp_ratio is above 1"};
constexpr Rule kCompressedCount{"sparse_count", "at most 8192 keys (K) where cmp_ratio is above 1"};
// From 2^32 elements on, the device's 32-bit offsets of d_key wrap around.
constexpr Rule kKeyElements{"key", "fewer than 2^32 elements"};
// Elsewhere the device reads, and writes to, keys that the padding names.
constexpr Rule kKeysForAllSlots{"sparse_indices",
                                "at least K keys in every sequence in sparse_mode 0"};

// Checks shared by the forward operator and its gradient.
template <typename Op>
SparseRules check_indexer_call(const Op& op, const KeyPages* pages = nullptr,
                               bool compressed = false) {
  SparseRules rules(Op::limits, op.layout, {"query", op.query}, {"key", op.key}, pages,
                    {.may_be_empty = compressed});
  rules.check_weights({"weights", op.weights}, rules.heads());
  rules.check_lengths(op.actual_seq_lengths_query, op.actual_seq_lengths_key);
  rules.check_sparse_mode(op.sparse_mode, {0, 3});
  const auto& device_limits = rules.limits();
  device_limits.size("query", "Nidx", rules.heads());
  device_limits.size("query", "Didx", rules.head_size());
  return rules;
}

}  // namespace

const OperatorLimits LightningIndexer::limits{
    name,
    functions,
    sparse_dtypes(),
    {{"Nidx", "query heads of the indexer", {.min = 1, .max = 64}, kA2A3},
     {"Nidx", "query heads of the indexer", {.one_of = {8, 16, 24, 32, 64}}, k950},
     kIndexDim,
     {"K", "selected keys per token", {.min = 1, .max = 2048}, kA2A3.before(Cann::v9_0)},
     {"K", "selected keys per token", {.min = 1, .max = 2048, .or_multiple_of = 1024}},
     kPageSize,
     kPreTokens,
     kNextTokens,
     {"cmp_ratio", "tokens per key", {.one_of = {1}}, kA2A3.before(Cann::v9_1)},
     {"cmp_ratio", "tokens per key", {.min = 1, .max = 128}, kA2A3},
     {"cmp_ratio", "tokens per key", {.one_of = {1}}, k950}},
    {kNotEmpty, kWeightsOf8_5, kWeightsOf950, kCompressedWeights, kCompressedHeads,
     kCompressedCount}};

const OperatorLimits LightningIndexerGrad::limits{
    name,
    functions,
    {{kA2A3, {at::kHalf, at::kBFloat16}}},
    {{"Nidx", "query heads of the indexer", {.one_of = {64}}, kA2A3.before(Cann::v9_1)},
     {"Nidx", "query heads of the indexer", {.min = 1, .max = 64}},
     kIndexDim,
     {"K", "selected keys per token", {.min = 1, .max = 2048}}},
    {kNotEmpty, kGradWeights, kKeyElements, kKeysForAllSlots}};

void LightningIndexer::check_compression(const SparseRules& rules) const {
  rules.check_compression(cmp_ratio, {"cmp_residual_key", cmp_residual_key}, sparse_mode,
                          actual_seq_lengths_query, actual_seq_lengths_key);
  const auto& device_limits = rules.limits();
  device_limits.size("cmp_ratio", "cmp_ratio", cmp_ratio);
  if (!device_limits || !compressed()) {
    return;
  }
  device_limits.rule(kCompressedWeights, weights.scalar_type() == at::kFloat,
                     dtype_name(weights.scalar_type()));
  const auto heads = rules.heads().maybe_as_int();
  device_limits.rule(kCompressedHeads, !heads || (*heads >= 8 && *heads <= 64), rules.heads());
  const auto count = sparse_count.maybe_as_int();
  device_limits.rule(kCompressedCount, !count || *count <= 8192, sparse_count);
}

LightningIndexer::Outputs LightningIndexer::check_and_allocate() const {
  const auto rules = check_indexer_call(*this, &pages, compressed());
  check_compression(rules);
  check_value(!pages.given() || !return_values, name, "return_values",
              "expected False because layout_key is PA_BSND, got True");
  rules.check_selection(sparse_count, pre_tokens, next_tokens);
  const auto& device_limits = rules.limits();
  const bool like_query = weights.dtype() == query.dtype();
  device_limits.rule(kWeightsOf8_5, like_query, dtype_name(weights.scalar_type()));
  device_limits.rule(kWeightsOf950, like_query, dtype_name(weights.scalar_type()));
  const auto selection = rules.selection_sizes(sparse_count);
  const auto of_values =
      compressed() ? query.options().dtype(statistics_dtype(query)) : query.options();
  return {new_tensor(selection, query.options().dtype(at::kInt)),
          return_values ? new_tensor(selection, of_values) : new_tensor({0}, of_values)};
}

LightningIndexerGrad::Outputs LightningIndexerGrad::check_and_allocate() const {
  const auto rules = check_indexer_call(*this);
  rules.check_sparse_indices({"sparse_indices", sparse_indices});
  rules.check_same_dtype({"d_values", d_values});
  rules.check_selected_values({"d_values", d_values}, sparse_indices);
  if (const auto& device_limits = rules.limits()) {
    device_limits.size("sparse_indices", "K", sparse_indices.sym_size(-1));
    device_limits.rule(kGradWeights, weights.dtype() == query.dtype(),
                       dtype_name(weights.scalar_type()));
    const auto elements = key.sym_numel().maybe_as_int();
    device_limits.rule(kKeyElements, !elements || *elements < int64_t{1} << 32, key.sym_numel());
    // The longest sequence has no more keys than this; check_key_lengths looks at all of them.
    const auto keys = key.sym_size(-3).maybe_as_int();
    if (keys) {
      check_key_count(device_limits, *keys);
    }
  }
  return {new_like(query), new_like(key), new_like(weights)};
}

void LightningIndexerGrad::check_key_count(const DeviceLimits& device_limits, int64_t keys) const {
  const auto count = sparse_indices.sym_size(-1).maybe_as_int();
  device_limits.rule(kKeysForAllSlots, sparse_mode != 0 || !count || *count <= keys, keys,
                     " keys for K = ", sparse_indices.sym_size(-1));
}

void LightningIndexerGrad::check_key_lengths(const std::vector<Sequence>& sequences) const {
  const DeviceLimits device_limits(limits);
  for (const auto& sequence : sequences) {
    if (sequence.queries > 0) {
      check_key_count(device_limits, sequence.keys);
    }
  }
}

}  // namespace ascend_attn
