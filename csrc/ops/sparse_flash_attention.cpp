#include "ops/sparse_flash_attention.h"

#include "core/error.h"
#include "core/sparse_rules.h"

namespace ascend_attn {
namespace {

at::Tensor new_like_or_empty(const std::optional<at::Tensor>& like, const at::Tensor& query) {
  return like ? new_like(*like) : new_tensor({0}, query.options());
}

// What the forward operator and its gradient have in common.
template <typename Op>
SparseShapes check_common(const Op& op, bool lengths_allowed_in_bsnd) {
  SparseShapes shapes(Op::name, op.layout, {"query", op.query}, {"key", op.key});
  shapes.same_dtype({"value", op.value});
  shapes.key_like({"value", op.value}, shapes.head_size());
  shapes.sparse_indices({"sparse_indices", op.sparse_indices});
  shapes.ropes({"query_rope", op.query_rope}, {"key_rope", op.key_rope});
  shapes.lengths(op.actual_seq_lengths_query, op.actual_seq_lengths_key, lengths_allowed_in_bsnd);
  shapes.sparse_mode(op.sparse_mode, {0, 3});
  check_value(op.sparse_block_size >= 1, Op::name, "sparse_block_size",
              "expected a positive number of keys per block, got ", op.sparse_block_size);
  const auto& limits = shapes.limits();
  limits.size("query", "N1", shapes.heads());
  limits.size("query", "D", shapes.head_size());
  limits.size("sparse_block_size", "sparse_block_size", op.sparse_block_size);
  return shapes;
}

}  // namespace

SparseFlashAttention::Outputs SparseFlashAttention::check_and_allocate() const {
  const auto shapes = check_common(*this, /*lengths_allowed_in_bsnd=*/true);
  return {new_like(query), shapes.new_statistics(), shapes.new_statistics()};
}

SparseFlashAttentionGrad::Outputs SparseFlashAttentionGrad::check_and_allocate() const {
  const auto shapes = check_common(*this, /*lengths_allowed_in_bsnd=*/false);
  for (const auto& argument : {TensorArgument{"d_out", d_out}, TensorArgument{"out", out}}) {
    shapes.same_dtype(argument);
    shapes.query_like(argument, shapes.heads(), shapes.head_size());
  }
  shapes.statistics({"softmax_max", softmax_max});
  shapes.statistics({"softmax_sum", softmax_sum});
  return {new_like(query), new_like(key), new_like(value), new_like_or_empty(query_rope, query),
          new_like_or_empty(key_rope, query)};
}

}  // namespace ascend_attn
