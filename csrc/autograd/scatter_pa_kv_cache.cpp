#include "ops/scatter_pa_kv_cache.h"

#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include "autograd/operator_function.h"

namespace ascend_attn {
namespace {

template <typename Function>
void for_each_cache(const ScatterPaKvCache& op, Function function) {
  function("key_cache", op.key_cache);
  if (op.value_cache) {
    function("value_cache", *op.value_cache);
  }
}

// Checked before the call, because torch would raise only after the write.
void check_versions(const ScatterPaKvCache& op) {
  for_each_cache(op, [](const char* name, const at::Tensor& cache) {
    check_value(!cache.defined() || !cache.is_inference() || c10::InferenceMode::is_enabled(),
                ScatterPaKvCache::name, name,
                "expected a tensor that may be written to here, got one made in inference mode; "
                "call it under torch.inference_mode(), or make the cache outside of it");
  });
}

// Tells autograd about the writes, so that it refuses a backward through a cache that has changed.
void bump_versions(const ScatterPaKvCache& op) {
  for_each_cache(op, [](const char*, const at::Tensor& cache) {
    cache.unsafeGetTensorImpl()->bump_version();
  });
}

TORCH_LIBRARY_IMPL(ascend, Autograd, m) {
  m.impl(ScatterPaKvCache::name,
         &InferenceOnly<ScatterPaKvCache, &check_versions, &bump_versions>::kernel);
}

at::Tensor without_negation(const at::Tensor& tensor) { return tensor.resolve_neg(); }
std::optional<at::Tensor> without_negation(const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional(tensor->resolve_neg()) : std::nullopt;
}
template <typename T>
const T& without_negation(const T& other) {
  return other;
}

template <typename Signature>
struct Negative;

// Handles negated views. torch's own fallback requires an operator to return what it has written
// to.
template <typename... Args>
struct Negative<ScatterPaKvCache::Outputs(Args...)> {
  static ScatterPaKvCache::Outputs kernel(Args... args) {
    check_tensors_given(ScatterPaKvCache::name, args...);
    for_each_cache({args...}, [](const char* name, const at::Tensor& cache) {
      check_value(!cache.is_neg(), ScatterPaKvCache::name, name,
                  "expected a tensor that holds its values, got a view that negates them");
    });
    return call<ScatterPaKvCache>(without_negation(args)...);
  }
};

TORCH_LIBRARY_IMPL(ascend, Negative, m) {
  m.impl(ScatterPaKvCache::name, &Negative<SignatureOf<ScatterPaKvCache>>::kernel);
}

}  // namespace
}  // namespace ascend_attn
