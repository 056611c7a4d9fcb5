#include "ops/scatter_pa_kv_cache.h"

#include <torch/library.h>

#include "autograd/operator_function.h"

namespace ascend_attn {
namespace {

// Autograd is told of the writes, so that it refuses a backward through a cache that has changed.
void bump_versions(const ScatterPaKvCache& op) {
  op.key_cache.unsafeGetTensorImpl()->bump_version();
  if (op.value_cache) {
    op.value_cache->unsafeGetTensorImpl()->bump_version();
  }
}

TORCH_LIBRARY_IMPL(ascend, Autograd, m) {
  m.impl(ScatterPaKvCache::name, &InferenceOnly<ScatterPaKvCache, &bump_versions>::kernel);
}

}  // namespace
}  // namespace ascend_attn
