#include "ops/sparse_flash_attention.h"

#include "core/error.h"
#include "core/sparse_rules.h"

namespace ascend_attn {
namespace {

constexpr Limit kAttentionHeads{"N1", "query heads", {.one_of = {1, 2, 4, 8, 16, 32, 64, 128}}};

at::Tensor new_like_or_empty(const std::optional<at::Tensor>& like, const at::Tensor& query) {
  return like ? new_like(*like) : new_tensor({0}, query.options());
}

// Checks shared by the forward operator and its gradient.
template <typename Op>
SparseRules check_common(const Op& op, bool lengths_allowed_in_bsnd) {
  SparseRules rules(Op::limits, op.options.layout, {"query", op.query}, {"key", op.key});
  rules.check_same_dtype({"value", op.value});
  rules.check_like_key({"value", op.value}, rules.head_size());
  rules.check_sparse_indices({"sparse_indices", op.sparse_indices});
  rules.check_ropes({"query_rope", op.options.query_rope}, {"key_rope", op.options.key_rope});
  rules.check_lengths(op.options.actual_seq_lengths_query, op.options.actual_seq_lengths_key,
                      lengths_allowed_in_bsnd);
  rules.check_sparse_mode(op.options.sparse_mode, {0, 3});
  check_value(op.options.sparse_block_size >= 1, Op::name, "sparse_block_size",
              "expected a positive number of keys per block, got ", op.options.sparse_block_size);
  const auto& limits = rules.limits();
  limits.size("query", "N1", rules.heads());
  limits.size("query", "D", rules.head_size());
  limits.size("sparse_block_size", "sparse_block_size", op.options.sparse_block_size);
  return rules;
}

}  // namespace

const OperatorLimits SparseFlashAttention::limits{
    name, functions, sparse_dtypes(),
    sparse_limits(
        {kAttentionHeads,
         kHeadDim,
         kRopeDim,
         kTrainingCount,
         {"sparse_block_size", "keys per block", {.one_of = {1, 2, 4, 8, 16, 32, 64, 128}}}})};

const OperatorLimits SparseFlashAttentionGrad::limits{
    name, functions, sparse_dtypes(),
    sparse_limits({kAttentionHeads,
                   kHeadDim,
                   kRopeDim,
                   kTrainingCount,
                   {"sparse_block_size", "keys per block", {.one_of = {1, 8, 16, 32, 64}}}})};

SparseFlashAttention::Outputs SparseFlashAttention::check_and_allocate() const {
  const auto rules = check_common(*this, /*lengths_allowed_in_bsnd=*/true);
  return {new_like(query), rules.new_statistics(), rules.new_statistics()};
}

SparseFlashAttentionGrad::Outputs SparseFlashAttentionGrad::check_and_allocate() const {
  const auto rules = check_common(*this, /*lengths_allowed_in_bsnd=*/false);
  for (const auto& argument : {NamedTensor{"d_out", d_out}, NamedTensor{"out", out}}) {
    rules.check_same_dtype(argument);
    rules.check_like_query(argument, rules.heads(), rules.head_size());
  }
  rules.check_statistics({"softmax_max", softmax_max});
  rules.check_statistics({"softmax_sum", softmax_sum});
  return {new_like(query), new_like(key), new_like(value),
          new_like_or_empty(options.query_rope, query), new_like_or_empty(options.key_rope, query)};
}

}  // namespace ascend_attn
