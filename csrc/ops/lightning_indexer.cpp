#include "ops/lightning_indexer.h"

#include "core/error.h"
#include "core/sparse_rules.h"

namespace ascend_attn {
namespace {

// What the forward operator and its gradient have in common.
template <typename Op>
SparseShapes check_common(const Op& op, bool lengths_allowed_in_bsnd) {
  SparseShapes shapes(Op::name, op.layout, {"query", op.query}, {"key", op.key});
  shapes.weights_like({"weights", op.weights}, shapes.heads());
  shapes.lengths(op.actual_seq_lengths_query, op.actual_seq_lengths_key, lengths_allowed_in_bsnd);
  shapes.sparse_mode(op.sparse_mode, {0, 3});
  const auto& limits = shapes.limits();
  limits.size("query", "Nidx", shapes.heads());
  limits.size("query", "Didx", shapes.head_size());
  return shapes;
}

}  // namespace

LightningIndexer::Outputs LightningIndexer::check_and_allocate() const {
  const auto shapes = check_common(*this, /*lengths_allowed_in_bsnd=*/true);
  const auto count = sparse_count.maybe_as_int();
  check_value(!count || *count >= 1, name, "sparse_count", "expected a positive number, got ",
              sparse_count);
  shapes.limits().size("sparse_count", "K", sparse_count);
  return {shapes.new_selection(sparse_count, at::kInt),
          return_values ? shapes.new_selection(sparse_count, query.scalar_type())
                        : new_tensor({0}, query.options())};
}

LightningIndexerGrad::Outputs LightningIndexerGrad::check_and_allocate() const {
  const auto shapes = check_common(*this, /*lengths_allowed_in_bsnd=*/false);
  shapes.sparse_indices({"sparse_indices", sparse_indices});
  shapes.same_dtype({"d_values", d_values});
  shapes.values_like({"d_values", d_values}, sparse_indices);
  return {new_like(query), new_like(key), new_like(weights)};
}

}  // namespace ascend_attn
