#include "ops/scatter_pa_kv_cache.h"

#include <torch/library.h>

#include "dispatch/without_gradient.h"

namespace ascend_attn {
namespace {

template <typename Function>
void for_each_cache(const ScatterPaKvCache& op, const Function& function) {
  function([] { return "key_cache"; }, op.key_cache);
  if (op.value_cache) {
    function([] { return "value_cache"; }, *op.value_cache);
  }
}

ScatterPaKvCache::Outputs scatter(const ScatterPaKvCache& op) {
  check_no_tangent(op);
  check_no_gradient(op, op.no_gradient);
  for_each_cache(
      op, [&](const auto& name, const at::Tensor& cache) { check_version(op.name, name, cache); });
  call_below_autograd(op);
  for_each_cache(op, [](const auto&, const at::Tensor& cache) { bump_version(cache); });
  return {};
}

ScatterPaKvCache::Outputs scatter_without_negation(const ScatterPaKvCache& op) {
  check_tensors_given(op);
  for_each_cache(op, [&](const auto& name, const at::Tensor& cache) {
    check_not_negated(op.name, name, cache);
  });
  return call(without_negation(op));
}

TORCH_LIBRARY_IMPL(ascend, Autograd, m) { register_function<ScatterPaKvCache, &scatter>(m); }

TORCH_LIBRARY_IMPL(ascend, Negative, m) {
  register_function<ScatterPaKvCache, &scatter_without_negation>(m);
}

}  // namespace
}  // namespace ascend_attn
