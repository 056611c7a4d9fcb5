#include "ops/scatter_pa_kv_cache.h"

#include <torch/library.h>

#include "autograd/operator_function.h"

namespace ascend_attn {
namespace {

void check_no_gradient(const char* argument, const at::Tensor& tensor) {
  check_implemented(!tensor.requires_grad(), ScatterPaKvCache::name, argument,
                    "expected a tensor without gradient, since none flows through a cache, got one "
                    "that requires grad; call it under torch.no_grad(), or detach the tensor");
}

template <typename Signature>
struct Inference;

// Writes without recording. Autograd is told, so that it refuses a backward through a cache that
// has changed since.
template <typename... Args>
struct Inference<ScatterPaKvCache::Outputs(Args...)> {
  static ScatterPaKvCache::Outputs kernel(Args... args) {
    check_no_tangent<ScatterPaKvCache>(args...);
    const ScatterPaKvCache op{args...};
    if (at::GradMode::is_enabled()) {
      check_no_gradient("key", op.key);
      check_no_gradient("key_cache", op.key_cache);
      if (op.value) {
        check_no_gradient("value", *op.value);
      }
      if (op.value_cache) {
        check_no_gradient("value_cache", *op.value_cache);
      }
    }
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      call<ScatterPaKvCache>(args...);
    }
    op.key_cache.unsafeGetTensorImpl()->bump_version();
    if (op.value_cache) {
      op.value_cache->unsafeGetTensorImpl()->bump_version();
    }
    return {};
  }
};

TORCH_LIBRARY_IMPL(ascend, Autograd, m) {
  m.impl(ScatterPaKvCache::name, &Inference<ScatterPaKvCache::Signature>::kernel);
}

}  // namespace
}  // namespace ascend_attn
