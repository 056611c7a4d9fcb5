#include <torch/library.h>

#include "cpu/kernels.h"
#include "ops/operator.h"

namespace ascend_attn {

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<SparseFlashAttention, cpu::sparse_flash_attention>(m);
  register_kernel<SparseFlashAttentionGrad, cpu::sparse_flash_attention_grad>(m);
}

}  // namespace ascend_attn
