#include "ops/sparse_lightning_indexer_grad_kl_loss.h"

#include "core/error.h"
#include "core/sparse_rules.h"

namespace ascend_attn {

SparseLightningIndexerGradKLLoss::Outputs SparseLightningIndexerGradKLLoss::check_and_allocate()
    const {
  const SparseShapes shapes(name, layout, {"query", query}, {"key", key});
  shapes.same_dtype({"query_index", query_index});
  shapes.same_dtype({"key_index", key_index});
  check_value(query_index.dim() == query.dim(), name, "query_index", "expected rank ", query.dim(),
              " for layout ", layout, ", got shape ", query_index.sym_sizes());
  const auto index_heads = query_index.sym_size(-2);
  const auto index_size = query_index.sym_size(-1);
  shapes.query_like({"query_index", query_index}, index_heads, index_size);
  shapes.key_like({"key_index", key_index}, index_size);
  shapes.weights_like({"weights", weights}, index_heads);
  shapes.sparse_indices({"sparse_indices", sparse_indices});
  shapes.statistics({"softmax_max", softmax_max});
  shapes.statistics({"softmax_sum", softmax_sum});
  shapes.ropes({"query_rope", query_rope}, {"key_rope", key_rope});
  shapes.lengths(actual_seq_lengths_query, actual_seq_lengths_key, /*allowed_in_bsnd=*/false);
  shapes.sparse_mode(sparse_mode, {3});

  if (const auto& limits = shapes.limits()) {
    limits.size("query", "N1", shapes.heads());
    limits.size("query", "D", shapes.head_size());
    limits.size("query_index", "Nidx", index_heads);
    limits.size("query_index", "Didx", index_size);
    check_present(query_rope.has_value(), name, "query_rope",
                  "expected a tensor, which the device requires, got None; on the CPU "
                  "ascend_attn_ops.limits(None) lifts the device's limits");
    if (shapes.layout() == Layout::BSND) {
      const auto query_length = query.sym_size(1).maybe_as_int();
      const auto key_length = key.sym_size(1).maybe_as_int();
      limits.rule("query", !query_length || !key_length || *query_length <= *key_length,
                  "at most as many query tokens as key tokens", query.sym_size(1), " and ",
                  key.sym_size(1));
    }
  }
  return {new_like(query_index), new_like(key_index), new_like(weights),
          new_tensor({1}, softmax_max.options())};
}

}  // namespace ascend_attn
