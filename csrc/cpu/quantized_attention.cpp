#include "cpu/quantized_attention.h"

#include "ops/error.h"

namespace ascend_attn::cpu {

void quantized_attention(const DenseAttention&, const Int8Scales&,
                         const std::optional<OutputQuantization>&, const at::Tensor&) {
  raise(Violation::not_implemented, PromptFlashAttention::name, "query",
        "expected a floating-point dtype on the CPU, got int8");
}

}  // namespace ascend_attn::cpu
