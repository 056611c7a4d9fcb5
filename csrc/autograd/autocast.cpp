// Autocast: an operator casts its floating-point tensors to the dtype of the region, as
// scaled_dot_product_attention does. Without autocast the dispatcher never comes here.
//
// attention_update, which merges results in float32, what reads int8 and what writes to a cache
// stay as they are.
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/memory.h"
#include "ops/operators.h"

namespace ascend_attn {
namespace {

// Positions of the arguments of a call that keep their dtype.
using Positions = std::vector<size_t>;

template <typename Op>
Positions kept_arguments(const Op&) {
  return {};
}
Positions kept_arguments(const SparseLightningIndexerGradKLLoss& op) {
  return {position_of(op, op.softmax_max), position_of(op, op.softmax_sum),
          position_of(op, op.token_weight)};
}
// Beside compressed keys, devices want float32 weights.
Positions kept_arguments(const LightningIndexer& op) {
  return op.compressed() && op.weights.scalar_type() == at::kFloat
             ? Positions{position_of(op, op.weights)}
             : Positions();
}
Positions kept_arguments(const SparseLightningIndexerKLLossGrad& op) {
  Positions kept{position_of(op, op.attn_softmax_l1_norm)};
  if (op.weights.scalar_type() == at::kFloat) {
    kept.push_back(position_of(op, op.weights));
  }
  return kept;
}
Positions kept_arguments(const FlashAttentionScore& op) {
  constexpr int64_t kFirstTypeOfSlopes = 2;  // which are float32
  Positions kept{position_of(op, op.extra.sink)};
  if (op.options.pse_type >= kFirstTypeOfSlopes) {
    kept.push_back(position_of(op, op.options.pse_shift));
  }
  return kept;
}
Positions kept_arguments(const PromptFlashAttention& op) {
  return {position_of(op, op.deq_scale1), position_of(op, op.quant_scale1),
          position_of(op, op.deq_scale2), position_of(op, op.quant_scale2),
          position_of(op, op.quant_offset2)};
}
Positions kept_arguments(const FusedInferAttentionScore& op) {
  // A sink is float32 or as query, and scales are float32 but those of channels.
  Positions kept;
  if (op.sink && op.sink->scalar_type() == at::kFloat) {
    kept.push_back(position_of(op, op.sink));
  }
  if (op.quantization.by_token() || op.quantization.of_query()) {
    kept.push_back(position_of(op, op.quantization.dequant_scale_query));
    kept.push_back(position_of(op, op.quantization.key_antiquant_scale));
    kept.push_back(position_of(op, op.quantization.value_antiquant_scale));
  }
  return kept;
}
Positions kept_arguments(const SparseFlashMla& op) { return {position_of(op, op.options.sink)}; }

// Leaves integers, float64 and tensors of other devices as they are.
template <typename Op, at::DeviceType device>
typename Op::Outputs cast_and_call(const Op& op) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const auto dtype = at::autocast::get_autocast_dtype(device);
  const auto kept = kept_arguments(op);
  // Tensors that are the same elements are cast once: the device wants value to be key itself.
  std::vector<std::pair<at::Tensor, at::Tensor>> casts;
  return call(map_tensors(op, [&](const at::Tensor& tensor, Place place) {
    if (!tensor.defined() || std::ranges::find(kept, place.position) != kept.end()) {
      return tensor;
    }
    for (const auto& [from, to] : casts) {
      if (from.is_same(tensor)) {
        return to;
      }
      // A detached one gets no gradient; autograd tells apart two that want theirs.
      if (!tensor.requires_grad() && same_elements(from, tensor)) {
        return to.requires_grad() ? to.detach() : to;
      }
    }
    return casts.emplace_back(tensor, at::autocast::cached_cast(dtype, tensor, device)).second;
  }));
}

using CastOperators =
    OperatorList<LightningIndexer, SparseFlashAttention, SparseLightningIndexerGradKLLoss,
                 SparseLightningIndexerKLLossGrad, FlashAttentionScore, PromptFlashAttention,
                 FusedInferAttentionScore, SparseFlashMla>;

template <at::DeviceType device>
void register_autocast(torch::Library& library) {
  CastOperators::for_each(
      [&]<typename Op>() { register_function<Op, &cast_and_call<Op, device>>(library); });
}

TORCH_LIBRARY_IMPL(ascend, AutocastCPU, m) { register_autocast<at::kCPU>(m); }

TORCH_LIBRARY_IMPL(ascend, AutocastPrivateUse1, m) { register_autocast<at::kPrivateUse1>(m); }

}  // namespace
}  // namespace ascend_attn
