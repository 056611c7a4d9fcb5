#include "ops/lightning_indexer.h"

#include "core/error.h"
#include "core/sparse_rules.h"

namespace ascend_attn {
namespace {

// Checks shared by the forward operator and its gradient.
template <typename Op>
SparseRules check_common(const Op& op, bool lengths_allowed_in_bsnd) {
  SparseRules rules(Op::limits, op.layout, {"query", op.query}, {"key", op.key});
  rules.check_weights({"weights", op.weights}, rules.heads());
  rules.check_lengths(op.actual_seq_lengths_query, op.actual_seq_lengths_key,
                      lengths_allowed_in_bsnd);
  rules.check_sparse_mode(op.sparse_mode, {0, 3});
  const auto& limits = rules.limits();
  limits.size("query", "Nidx", rules.heads());
  limits.size("query", "Didx", rules.head_size());
  return rules;
}

}  // namespace

const OperatorLimits LightningIndexer::limits{
    name, functions, sparse_dtypes(),
    sparse_limits({kIndexHeads,
                   kIndexDim,
                   {"K",
                    "selected keys per token",
                    {.min = 1, .max = 2048, .one_of = {3072, 4096, 5120, 6144, 7168, 8192}}}})};

const OperatorLimits LightningIndexerGrad::limits{
    name, functions, sparse_dtypes(), sparse_limits({kIndexHeads, kIndexDim, kTrainingCount})};

LightningIndexer::Outputs LightningIndexer::check_and_allocate() const {
  const auto rules = check_common(*this, /*lengths_allowed_in_bsnd=*/true);
  const auto count = sparse_count.maybe_as_int();
  check_value(!count || *count >= 1, name, "sparse_count", "expected a positive number, got ",
              sparse_count);
  rules.limits().size("sparse_count", "K", sparse_count);
  return {rules.new_selection(sparse_count, at::kInt),
          return_values ? rules.new_selection(sparse_count, query.scalar_type())
                        : new_tensor({0}, query.options())};
}

LightningIndexerGrad::Outputs LightningIndexerGrad::check_and_allocate() const {
  const auto rules = check_common(*this, /*lengths_allowed_in_bsnd=*/false);
  rules.check_sparse_indices({"sparse_indices", sparse_indices});
  rules.check_same_dtype({"d_values", d_values});
  rules.check_values({"d_values", d_values}, sparse_indices);
  return {new_like(query), new_like(key), new_like(weights)};
}

}  // namespace ascend_attn
