#include "ops/attention_update.h"

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <limits>
#include <vector>

#include "core/device_limits.h"
#include "core/error.h"
#include "core/tensor_checks.h"
#include "dispatch/operator.h"

namespace ascend_attn {
namespace {

// Returns the shape of n stacked parts.
c10::SymDimVector stacked(size_t n, const at::Tensor& part) {
  c10::SymDimVector sizes{static_cast<int64_t>(n)};
  sizes.append(part.sym_sizes().begin(), part.sym_sizes().end());
  return sizes;
}

// Lists that are empty select no backend, so the dispatcher falls back to this kernel, whose checks
// raise.
void no_backend(const AttentionUpdate& op, AttentionUpdate::Outputs&) {
  check_implemented(false, op.name, "device", "expected the CPU or an NPU, got ",
                    op.lse[0].device());
}

TORCH_LIBRARY_IMPL(ascend, CompositeExplicitAutograd, m) {
  register_kernel<AttentionUpdate, no_backend>(m);
}

}  // namespace

const OperatorLimits AttentionUpdate::limits{
    name,
    functions,
    {{on(Product::A2, Product::A3, Product::P950), {at::kHalf, at::kBFloat16, at::kFloat}}},
    {{"n", "parts", {.min = 1, .max = 128}, kA2A3.since(Cann::v9_1)},
     {"n", "parts", {.min = 1, .max = 16}, kA2A3.before(Cann::v9_1)},
     {"n", "parts", {.min = 1, .max = 16}, k950},
     {"D", "head size", {.min = 8, .max = 512, .multiple_of = 8}}}};

AttentionUpdate::Outputs AttentionUpdate::check_and_allocate() const {
  const auto n = static_cast<int64_t>(lse.size());
  check_value(n > 0, name, "lse", "expected at least one tensor, got an empty list");
  check_value(local_out.size() == lse.size(), name, "local_out", "expected ", n,
              " tensors, as many as lse has, got ", local_out.size());
  const NamedTensor first{"local_out", local_out[0], 0};
  const auto& tensor = first.tensor;
  check_attention_dtype(name, first);
  check_value(tensor.dim() >= 1, name, first.text(), "expected shape (..., D), got ",
              tensor.sym_sizes());
  const auto leading = tensor.sym_sizes().slice(0, tensor.dim() - 1);
  for (int64_t i = 0; i < n; ++i) {
    const NamedTensor part{"local_out", local_out[i], i};
    check_device(name, part, first);
    check_dtype(name, part, first);
    check_shape(name, part, tensor.sym_sizes(), "(..., D)");
    const NamedTensor statistics{"lse", lse[i], i};
    check_device(name, statistics, first);
    check_dtype(name, statistics, statistics_dtype(tensor));
    check_shape(name, statistics, leading, "(...)");
  }
  const DeviceLimits device_limits(limits);
  device_limits.dtype("local_out", tensor.scalar_type());
  device_limits.size("lse", "n", n);
  device_limits.size("local_out", "D", tensor.sym_size(-1));
  return {new_like(tensor), new_like(lse[0])};
}

AttentionUpdateGrad::Outputs AttentionUpdateGrad::check_and_allocate() const {
  return {new_tensor(stacked(lse.size(), lse[0]), lse[0].options()),
          new_tensor(stacked(lse.size(), local_out[0]), local_out[0].options())};
}

at::Tensor rows_without_keys(const at::Tensor& stacked_lse) { return stacked_lse.isinf().all(0); }

}  // namespace ascend_attn
