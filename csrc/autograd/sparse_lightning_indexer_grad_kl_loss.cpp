#include "ops/sparse_lightning_indexer_grad_kl_loss.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "autograd/saved_call.h"

// The operator computes the loss and its gradients together. Autograd sees only a loss: its
// backward scales the computed gradients by the incoming one, on the device, without reading its
// value.
namespace ascend_attn {

// The attention that the indexer imitates is a fixed target, to which autograd gets no edges. An
// edge that carries undefined gradients alone is not harmless: the backward of DTensor.to_local(),
// for one, wants a defined one.
variable_list SparseLightningIndexerGradKLLoss::operands() const {
  return {query_index, key_index, weights};
}

bool SparseLightningIndexerGradKLLoss::differentiable() const {
  return std::ranges::any_of(operands(), &at::Tensor::requires_grad);
}

void SparseLightningIndexerGradKLLoss::save(AutogradContext& context,
                                            const Outputs& outputs) const {
  const auto& [d_query_index, d_key_index, d_weights, loss] = outputs;
  // Saves no arguments: the backward reads none of them.
  context.save_for_backward({d_query_index, d_key_index, d_weights});
}

variable_list SparseLightningIndexerGradKLLoss::backward(AutogradContext& context,
                                                         const variable_list& d_outputs) {
  // The saved gradients are constants: a second derivative would silently be zero.
  if (at::GradMode::is_enabled()) {
    raise_second_derivative(name);
  }
  const auto& d_loss = d_outputs[3];
  if (!d_loss.defined()) {
    return no_gradients<SparseLightningIndexerGradKLLoss>();
  }
  auto gradients = context.get_saved_variables();
  for (auto& gradient : gradients) {
    // Multiplied in fp32: for a mean over many tokens, d_loss is small.
    gradient = gradient.mul(d_loss).to(gradient.scalar_type());
  }
  return gradients;
}

}  // namespace ascend_attn
