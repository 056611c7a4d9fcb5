#include "ops/lightning_indexer.h"

#include "autograd/saved_call.h"
#include "core/determinism.h"
#include "core/error.h"
#include "dispatch/operator.h"

namespace ascend_attn {

// The indexer is differentiable through the values it returns, not through the selection.
bool LightningIndexer::differentiable() const {
  check_implemented(!return_values || !compressed(), name, "cmp_ratio",
                    "expected 1 where a gradient is required, since CANN's gradient knows no "
                    "compressed keys, got ",
                    cmp_ratio,
                    "; a loss of the indexer trains it: call this under torch.no_grad(), or detach "
                    "the tensors");
  return return_values;
}

void LightningIndexer::save(AutogradContext& context, const Outputs& outputs) const {
  const auto& sparse_indices = std::get<0>(outputs);
  SavedCall<LightningIndexer>::save(context, *this, {sparse_indices});
  context.saved_data["deterministic"] = is_deterministic(false);
}

variable_list LightningIndexer::backward(AutogradContext& context, const variable_list& d_outputs) {
  const auto& d_values = d_outputs[1];
  if (!d_values.defined()) {
    return no_gradients<LightningIndexer>();
  }
  const SavedCall<LightningIndexer> saved(context);
  const auto& op = saved.op();
  const auto gradients =
      call(LightningIndexerGrad{.query = op.query,
                                .key = op.key,
                                .d_values = d_values,
                                .sparse_indices = saved.output(0),
                                .weights = op.weights,
                                .actual_seq_lengths_query = op.actual_seq_lengths_query,
                                .actual_seq_lengths_key = op.actual_seq_lengths_key,
                                .layout = op.layout,
                                .sparse_mode = op.sparse_mode,
                                .pre_tokens = op.pre_tokens,
                                .next_tokens = op.next_tokens,
                                .deterministic = context.saved_data["deterministic"].toBool()});
  return gradients_of(op, gradients, op.query, op.key, op.weights);
}

}  // namespace ascend_attn
