#include "ops/prompt_flash_attention.h"

#include <torch/library.h>

#include <algorithm>
#include <array>
#include <utility>

#include "autograd/operator_function.h"

namespace ascend_attn {
namespace {

template <typename Signature>
struct InferenceOnly;

template <typename... Args>
struct InferenceOnly<PromptFlashAttention::Outputs(Args...)> {
  static PromptFlashAttention::Outputs kernel(Args... args) {
    check_no_tangent<PromptFlashAttention>(args...);
    if (at::GradMode::is_enabled() && (requires_grad(args) || ...)) {
      raise_no_gradient({args...});
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call<PromptFlashAttention>(args...);
  }

 private:
  [[noreturn]] static void raise_no_gradient(const PromptFlashAttention& op) {
    const std::array<std::pair<const char*, bool>, 8> arguments{
        {{"query", requires_grad(op.query)},
         {"key", requires_grad(op.key)},
         {"value", requires_grad(op.value)},
         {"atten_mask", requires_grad(op.atten_mask)},
         {"deq_scale1", requires_grad(op.deq_scale1)},
         {"quant_scale1", requires_grad(op.quant_scale1)},
         {"deq_scale2", requires_grad(op.deq_scale2)},
         {"quant_scale2", requires_grad(op.quant_scale2)}}};
    const auto first =
        std::ranges::find_if(arguments, [](const auto& each) { return each.second; });
    const char* argument = first == arguments.end() ? "quant_offset2" : first->first;
    raise(Violation::not_implemented, PromptFlashAttention::name, argument,
          "expected a tensor without gradient, got one that requires grad; train with "
          "flash_attention_score, or call it under torch.no_grad()");
  }
};

TORCH_LIBRARY_IMPL(ascend, Autograd, m) {
  m.impl(PromptFlashAttention::name, &InferenceOnly<PromptFlashAttention::Signature>::kernel);
}

}  // namespace
}  // namespace ascend_attn
