#include "ops/scatter_pa_kv_cache.h"

#include "npu/aclnn/product.h"
#include "npu/kernel.h"

namespace ascend_attn::aclnn {
namespace {

using ScatterPaKvCachePrototype = int(AclTensor key, AclTensor key_cache, AclTensor slot_mapping,
                                      AclTensor value, AclTensor value_cache,
                                      AclTensor compress_lens, AclTensor compress_seq_offset,
                                      AclTensor seq_lens, char* cache_mode, char* scatter_mode,
                                      AclIntArray strides, AclIntArray offsets);
constexpr Launcher<ScatterPaKvCache, ScatterPaKvCachePrototype> aclnn_scatter_pa_kv_cache;

void scatter_pa_kv_cache(const ScatterPaKvCache& op, ScatterPaKvCache::Outputs&) {
  op.check_memory();
  if (op.key.numel() == 0) {
    return;
  }
  // On A2 and A3 row t is read at t * N * D, whatever the strides: CANN 9.1 gives wrong rows
  // without a word, earlier releases refuse the call. Ascend 950 reads by strides.
  static const bool by_strides = runs_on(k950);
  const auto rows = [](const at::Tensor& source) {
    return by_strides ? source : source.contiguous();
  };
  // The function rejects a null pointer: a tensor without axes stands for missing values.
  const auto none = op.value ? at::Tensor() : new_tensor({}, op.key.options());
  aclnn_scatter_pa_kv_cache(rows(op.key), op.key_cache, op.slot_mapping,
                            op.value ? rows(*op.value) : none,
                            op.value_cache ? *op.value_cache : none, op.compress_lens,
                            op.compress_seq_offset, op.seq_lens, op.cache_mode, op.scatter_mode,
                            at::IntArrayRef(op.strides), at::IntArrayRef(op.offsets));
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) {
  register_checked_kernel<ScatterPaKvCache, scatter_pa_kv_cache>(m);
}

}  // namespace
}  // namespace ascend_attn::aclnn
