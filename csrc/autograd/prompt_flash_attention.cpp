#include "ops/prompt_flash_attention.h"

#include <torch/library.h>

#include "autograd/operator_function.h"

namespace ascend_attn {
namespace {

template <typename Signature>
struct InferenceOnly;

template <typename... Args>
struct InferenceOnly<PromptFlashAttention::Outputs(Args...)> {
  static PromptFlashAttention::Outputs kernel(Args... args) {
    if (at::GradMode::is_enabled() && (requires_grad(args) || ...)) {
      raise_no_gradient({args...});
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call<PromptFlashAttention>(args...);
  }

 private:
  [[noreturn]] static void raise_no_gradient(const PromptFlashAttention& op) {
    const char* argument = op.query.requires_grad()   ? "query"
                           : op.key.requires_grad()   ? "key"
                           : op.value.requires_grad() ? "value"
                                                      : "scales";
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
