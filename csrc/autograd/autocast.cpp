// Autocast: an operator casts its floating-point tensors to the dtype of the region, as
// scaled_dot_product_attention does. Without autocast the dispatcher never comes here.
//
// attention_update, which merges results in float32, and what writes to a cache stay as they are.
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "ops/operators.h"

namespace ascend_attn {
namespace {

// Addresses of the arguments of a call that keep their dtype.
using KeptArguments = std::vector<const void*>;

template <typename Op>
KeptArguments kept_arguments(const Op&) {
  return {};
}
KeptArguments kept_arguments(const SparseLightningIndexerGradKLLoss& op) {
  return {&op.softmax_max, &op.softmax_sum, &op.weight};
}
KeptArguments kept_arguments(const FlashAttentionScore& op) {
  constexpr int64_t kFirstTypeOfSlopes = 2;  // which are float32
  return op.options.pse_type >= kFirstTypeOfSlopes ? KeptArguments{&op.options.pse_shift}
                                                   : KeptArguments{};
}
KeptArguments kept_arguments(const PromptFlashAttention& op) {
  return {&op.deq_scale1, &op.quant_scale1, &op.deq_scale2, &op.quant_scale2, &op.quant_offset2};
}

// The casts of one call. A tensor that is passed twice is cast once: the device wants value to be
// key itself.
template <at::DeviceType device>
class Casts {
 public:
  // Leaves integers, float64 and tensors of other devices as they are.
  at::Tensor unless(bool keep, const at::Tensor& tensor) {
    if (keep || !tensor.defined()) {
      return tensor;
    }
    for (const auto& [from, to] : done_) {
      if (from.is_same(tensor)) {
        return to;
      }
    }
    const auto dtype = at::autocast::get_autocast_dtype(device);
    return done_.emplace_back(tensor, at::autocast::cached_cast(dtype, tensor, device)).second;
  }
  std::optional<at::Tensor> unless(bool keep, const std::optional<at::Tensor>& tensor) {
    return tensor ? std::optional(unless(keep, *tensor)) : std::nullopt;
  }
  template <typename Argument>
  const Argument& unless(bool, const Argument& argument) {
    return argument;
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> done_;
};

template <typename Op, at::DeviceType device, typename Signature = SignatureOf<Op>>
struct Autocast;

template <typename Op, at::DeviceType device, typename... Args>
struct Autocast<Op, device, typename Op::Outputs(Args...)> {
  static typename Op::Outputs kernel(Args... args) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(
        at::autocast::get_autocast_dispatch_key_from_device_type(device));
    const auto kept = kept_arguments(Op{args...});
    Casts<device> casts;
    const auto cast = [&](const auto& argument) -> decltype(auto) {
      const bool keep = std::ranges::find(kept, static_cast<const void*>(&argument)) != kept.end();
      return casts.unless(keep, argument);
    };
    return call<Op>(cast(args)...);
  }
};

template <at::DeviceType device, typename... Ops>
void register_autocast(OperatorList<Ops...>, torch::Library& library) {
  (library.impl(Ops::name, &Autocast<Ops, device>::kernel), ...);
}

using CastOperators =
    OperatorList<LightningIndexer, SparseFlashAttention, SparseLightningIndexerGradKLLoss,
                 FlashAttentionScore, PromptFlashAttention>;

TORCH_LIBRARY_IMPL(ascend, AutocastCPU, m) { register_autocast<at::kCPU>(CastOperators(), m); }

TORCH_LIBRARY_IMPL(ascend, AutocastPrivateUse1, m) {
  register_autocast<at::kPrivateUse1>(CastOperators(), m);
}

}  // namespace
}  // namespace ascend_attn
