// The CPU kernel of every operator. The arguments are checked and the outputs allocated, but not
// initialised; a kernel checks the values of sparse_indices and lengths, which only it can read.
#pragma once

#include "ops/sparse_flash_attention.h"

namespace ascend_attn::cpu {

void sparse_flash_attention(const SparseFlashAttention& op, SparseFlashAttention::Outputs& outputs);
void sparse_flash_attention_grad(const SparseFlashAttentionGrad& op,
                                 SparseFlashAttentionGrad::Outputs& outputs);

}  // namespace ascend_attn::cpu
