#include "ops/sparse_lightning_indexer_kl_loss_grad.h"

#include <ATen/Context.h>

#include "core/error.h"
#include "ops/sparse_rules.h"

namespace ascend_attn {
namespace {

constexpr Rule kTokens{"query_index", kNotEmpty.expected};
constexpr Rule kFloatWeights{"weights", "float32", kAllDevices, Violation::type};
constexpr Rule kNotDeterministic{"deterministic", "False, as CANN documents no such kernel"};

// torch's own switch, set to warn alone, asks for no error.
bool must_be_deterministic(bool argument) {
  const auto& context = at::globalContext();
  return argument ||
         (context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly());
}

}  // namespace

const OperatorLimits SparseLightningIndexerKLLossGrad::limits{
    name,
    functions,
    {{kA2A3.since(Cann::v9_1), {at::kHalf, at::kBFloat16}}},
    {{"B", "batches, or sequences", {.min = 1, .max = 256}},
     {"S1", "query tokens per sequence", {.min = 0, .max = 8192}},
     {"S2", "key tokens per sequence", {.min = 0, .max = 512 * 1024}},
     {"Nidx", "query heads of the indexer", {.one_of = {8, 16, 32, 64}}},
     kIndexDim,
     {"K", "selected keys per token", {.one_of = {512, 1024}}},
     {"cmp_ratio", "tokens per key", {.one_of = {1, 4, 128}}}},
    {kTokens, kFloatWeights, kNotDeterministic}};

SparseLightningIndexerKLLossGrad::Outputs SparseLightningIndexerKLLossGrad::check_and_allocate()
    const {
  const SparseRules rules(limits, layout, {"query_index", query_index}, {"key_index", key_index},
                          nullptr, {.may_be_empty = cmp_ratio > 1});
  rules.check_weights({"weights", weights}, rules.heads());
  rules.check_sparse_indices({"sparse_indices", sparse_indices});
  const NamedTensor target{"attn_softmax_l1_norm", attn_softmax_l1_norm};
  check_dtype(name, target, statistics_dtype(query_index));
  rules.check_selected_values(target, sparse_indices);
  rules.check_lengths(actual_seq_lengths_query, actual_seq_lengths_key);
  rules.check_sparse_mode(sparse_mode, {0, 3});
  rules.check_compression(cmp_ratio, {"cmp_residual_key", cmp_residual_key}, sparse_mode,
                          actual_seq_lengths_query, actual_seq_lengths_key);

  if (const auto& device_limits = rules.limits()) {
    const bool packed = rules.layout() == Layout::TND;
    device_limits.size("query_index", "Nidx", rules.heads());
    device_limits.size("query_index", "Didx", rules.head_size());
    device_limits.size("sparse_indices", "K", sparse_indices.sym_size(-1));
    device_limits.size("cmp_ratio", "cmp_ratio", cmp_ratio);
    device_limits.rule(kFloatWeights, weights.scalar_type() == at::kFloat,
                       dtype_name(weights.scalar_type()));
    device_limits.rule(kNotDeterministic, !must_be_deterministic(deterministic), "True");
    device_limits.size("query_index", "B",
                       packed ? actual_seq_lengths_query->sym_numel() : query_index.sym_size(0));
    if (!packed) {
      device_limits.size("query_index", "S1", query_index.sym_size(1));
      device_limits.size("key_index", "S2", key_index.sym_size(1));
    }
  }
  return {new_like(query_index), new_like(key_index), new_like(weights),
          new_tensor(sparse_indices.sym_sizes(), attn_softmax_l1_norm.options())};
}

void SparseLightningIndexerKLLossGrad::check_key_lengths(
    const std::vector<Sequence>& sequences) const {
  const DeviceLimits device_limits(limits);
  if (!device_limits || layout != Layout::TND) {
    return;
  }
  for (const auto& sequence : sequences) {
    device_limits.size("query_index", "S1", sequence.queries);
    device_limits.size("key_index", "S2", sequence.keys);
  }
}

KLLossSelection SparseLightningIndexerKLLossGrad::selection() const {
  return {query_index,
          key_index,
          sparse_indices,
          actual_seq_lengths_query,
          actual_seq_lengths_key,
          cmp_residual_key,
          layout,
          sparse_mode,
          cmp_ratio};
}

}  // namespace ascend_attn
