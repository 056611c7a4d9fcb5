#include "ops/sparse_lightning_indexer_grad_kl_loss.h"

#include <torch/library.h>

#include <algorithm>
#include <array>

#include "dispatch/operator_function.h"

namespace ascend_attn {
namespace {

// The operator computes the loss and its gradients together. Autograd sees only a loss: its
// backward scales the computed gradients by the incoming one, on the device, without reading its
// value.
struct KLLossFunction : OperatorFunction<KLLossFunction, SparseLightningIndexerGradKLLoss> {
  // The arguments whose gradients are saved.
  static constexpr std::array kTrained{"query_index", "key_index", "weights"};

  // The attention that the indexer imitates is a fixed target.
  static bool differentiable(const SparseLightningIndexerGradKLLoss& op) {
    return op.query_index.requires_grad() || op.key_index.requires_grad() ||
           op.weights.requires_grad();
  }

  // Autograd gets no edges to the others. An edge that carries undefined gradients alone is not
  // harmless: the backward of DTensor.to_local(), for one, wants a defined one.
  static SparseLightningIndexerGradKLLoss operands(const SparseLightningIndexerGradKLLoss& op) {
    const std::array trained{position_of(op, op.query_index), position_of(op, op.key_index),
                             position_of(op, op.weights)};
    return map_tensors(op, [&](const at::Tensor& tensor, Place place) {
      const bool is_trained = std::ranges::find(trained, place.position) != trained.end();
      return is_trained || !tensor.requires_grad() ? tensor : tensor.detach();
    });
  }

  static void save(AutogradContext* context, const SparseLightningIndexerGradKLLoss&,
                   const Outputs& outputs) {
    const auto& [d_query_index, d_key_index, d_weights, loss] = outputs;
    // Saves no arguments: the backward reads none of them.
    context->save_for_backward({d_query_index, d_key_index, d_weights});
    context->mark_non_differentiable({d_query_index, d_key_index, d_weights});
  }

  static variable_list gradients(AutogradContext* context, const variable_list& d_outputs) {
    // The saved gradients are constants: a second derivative would silently be zero.
    if (at::GradMode::is_enabled()) {
      raise_second_derivative(SparseLightningIndexerGradKLLoss::name);
    }
    const auto& d_loss = d_outputs[3];
    auto gradients = no_gradients<SparseLightningIndexerGradKLLoss>();
    if (!d_loss.defined()) {
      return gradients;
    }
    const auto saved = context->get_saved_variables();
    for (size_t i = 0; i < saved.size(); ++i) {
      const auto position = argument_position(SparseLightningIndexerGradKLLoss::name, kTrained[i]);
      // Multiplied in fp32: for a mean over many tokens, d_loss is small.
      gradients[position] = saved[i].mul(d_loss).to(saved[i].scalar_type());
    }
    return gradients;
  }
};

TORCH_LIBRARY_IMPL(ascend, Autograd, m) {
  register_function<SparseLightningIndexerGradKLLoss, &KLLossFunction::kernel>(m);
}

}  // namespace
}  // namespace ascend_attn
