#include "ops/prompt_flash_attention.h"

#include <torch/library.h>

#include "dispatch/without_gradient.h"

namespace ascend_attn {

TORCH_LIBRARY_IMPL(ascend, Autograd, m) {
  register_function<PromptFlashAttention, &infer<PromptFlashAttention>>(m);
}

}  // namespace ascend_attn
