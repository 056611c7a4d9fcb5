#include "ops/scatter_pa_kv_cache.h"

#include <torch/library.h>

#include "dispatch/operator_function.h"

namespace ascend_attn {
namespace {

template <typename Function>
void for_each_cache(const ScatterPaKvCache& op, Function function) {
  function("key_cache", op.key_cache);
  if (op.value_cache) {
    function("value_cache", *op.value_cache);
  }
}

void check_versions(const ScatterPaKvCache& op) {
  for_each_cache(op, [](const char* name, const at::Tensor& cache) {
    check_version(ScatterPaKvCache::name, [&] { return name; }, cache);
  });
}

void bump_versions(const ScatterPaKvCache& op) {
  for_each_cache(op, [](const char*, const at::Tensor& cache) { bump_version(cache); });
}

TORCH_LIBRARY_IMPL(ascend, Autograd, m) {
  m.impl(ScatterPaKvCache::name,
         &InferenceOnly<ScatterPaKvCache, &check_versions, &bump_versions>::kernel);
}

template <typename Signature>
struct Negative;

template <typename... Args>
struct Negative<ScatterPaKvCache::Outputs(Args...)> {
  static ScatterPaKvCache::Outputs kernel(Args... args) {
    check_tensors_given(ScatterPaKvCache::name, args...);
    for_each_cache({args...}, [](const char* name, const at::Tensor& cache) {
      check_not_negated(ScatterPaKvCache::name, name, cache);
    });
    return call<ScatterPaKvCache>(without_negation(args)...);
  }
};

TORCH_LIBRARY_IMPL(ascend, Negative, m) {
  m.impl(ScatterPaKvCache::name, &Negative<SignatureOf<ScatterPaKvCache>>::kernel);
}

}  // namespace
}  // namespace ascend_attn
