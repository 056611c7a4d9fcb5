#include "ops/prompt_flash_attention.h"

#include <torch/library.h>

#include "dispatch/operator_function.h"

namespace ascend_attn {

TORCH_LIBRARY_IMPL(ascend, Autograd, m) {
  m.impl(PromptFlashAttention::name, &InferenceOnly<PromptFlashAttention>::kernel);
}

}  // namespace ascend_attn
