#include "ops/lightning_indexer.h"

#include <ATen/Context.h>
#include <torch/library.h>

#include "autograd/operator_function.h"
#include "core/sequence_lengths.h"

namespace ascend_attn {
namespace {

// The indexer is differentiable through the values that it returns; the selection is not.
struct LightningIndexerFunction : OperatorFunction<LightningIndexerFunction, LightningIndexer> {
  static bool differentiable(const LightningIndexer& op) {
    if (op.return_values) {
      check_lengths_have_gradient(op.name, op.layout, op.actual_seq_lengths_query,
                                  op.actual_seq_lengths_key);
    }
    return op.return_values;
  }

  static void save(AutogradContext* context, const LightningIndexer& op, const Outputs& outputs) {
    const auto& sparse_indices = std::get<0>(outputs);
    context->save_for_backward({op.query, op.key, op.weights, sparse_indices,
                                op.actual_seq_lengths_query.value_or(at::Tensor()),
                                op.actual_seq_lengths_key.value_or(at::Tensor())});
    context->mark_non_differentiable({sparse_indices});
    auto& options = context->saved_data;
    options["layout"] = std::string(op.layout);
    options["sparse_mode"] = op.sparse_mode;
    options["pre_tokens"] = op.pre_tokens;
    options["next_tokens"] = op.next_tokens;
    options["deterministic"] = at::globalContext().deterministicAlgorithms();
  }

  static variable_list gradients(AutogradContext* context, const variable_list& incoming) {
    auto gradients = no_gradients();
    const auto& d_values = incoming[1];
    if (!d_values.defined()) {
      return gradients;
    }
    const auto saved = context->get_saved_variables();
    const auto optional = [&saved](size_t index) {
      return saved[index].defined() ? std::optional(saved[index]) : std::nullopt;
    };
    auto& options = context->saved_data;
    auto [d_query, d_key, d_weights] = call<LightningIndexerGrad>(
        saved[0], saved[1], d_values, saved[3], saved[2], optional(4), optional(5),
        options["layout"].toStringRef(), options["sparse_mode"].toInt(),
        options["pre_tokens"].toInt(), options["next_tokens"].toInt(),
        options["deterministic"].toBool());
    gradients[0] = std::move(d_query);
    gradients[1] = std::move(d_key);
    gradients[2] = std::move(d_weights);
    return gradients;
  }
};

TORCH_LIBRARY_IMPL(ascend, Autograd, m) {
  m.impl(LightningIndexer::name, &LightningIndexerFunction::kernel);
  m.impl(LightningIndexerGrad::name, &FirstDerivativeOnly<LightningIndexerGrad>::kernel);
}

}  // namespace
}  // namespace ascend_attn
