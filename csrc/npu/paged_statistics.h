// Statistics of SparseFlashAttention with paged keys. CANN refuses them, so the launch gathers the
// keys from their pages, on the device and without waiting for it.
#pragma once

#include "ops/sparse_flash_attention.h"

namespace ascend_attn::aclnn {

// Computes a call with paged keys by calls of `attend` with contiguous keys.
void attend_to_gathered_keys(const SparseFlashAttention& op,
                             const SparseFlashAttention::Outputs& outputs,
                             void (*attend)(const SparseFlashAttention&,
                                            SparseFlashAttention::Outputs&));

}  // namespace ascend_attn::aclnn
