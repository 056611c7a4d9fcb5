#include "ops/sparse_lightning_indexer_grad_kl_loss.h"

#include "core/error.h"
#include "core/sparse_rules.h"

namespace ascend_attn {
namespace {

constexpr Rule kKeysCoverQueries{"query", "at most as many query tokens as key tokens"};

}  // namespace

const OperatorLimits SparseLightningIndexerGradKLLoss::limits{
    name,
    functions,
    sparse_dtypes(),
    sparse_limits({{"N1", "query heads", {.one_of = {8, 16, 32, 64, 128}}},
                   kHeadDim,
                   kRopeDim,
                   kIndexHeads,
                   kIndexDim,
                   kTrainingCount}),
    {kKeysCoverQueries}};

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
  rules.check_lengths(actual_seq_lengths_query, actual_seq_lengths_key, /*allowed_in_bsnd=*/false);
  rules.check_sparse_mode(sparse_mode, {3});

  if (const auto& on_device = rules.limits()) {
    on_device.size("query", "N1", rules.heads());
    on_device.size("query", "D", rules.head_size());
    on_device.size("query_index", "Nidx", index_heads);
    on_device.size("query_index", "Didx", index_size);
    check_present(query_rope.has_value(), name, "query_rope",
                  "expected a tensor, which the device requires, got None; on the CPU "
                  "ascend_attn_ops.limits(None) lifts the device's limits");
    if (rules.layout() == Layout::BSND) {
      const auto query_length = query.sym_size(1).maybe_as_int();
      const auto key_length = key.sym_size(1).maybe_as_int();
      on_device.rule(kKeysCoverQueries,
                     !query_length || !key_length || *query_length <= *key_length,
                     query.sym_size(1), " and ", key.sym_size(1));
    }
  }
  return {new_like(query_index), new_like(key_index), new_like(weights),
          new_tensor({1}, softmax_max.options())};
}

}  // namespace ascend_attn
