#include "ops/flash_attention_score.h"

#include <cstddef>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "npu/aclnn/product.h"
#include "npu/call_of_statistics.h"
#include "npu/dense_lists.h"
#include "npu/flash_attention_extended.h"
#include "npu/kernel.h"
#include "npu/padded_batch.h"
#include "npu/sink_and_ropes.h"

namespace ascend_attn::aclnn {
namespace {

// The functions for layout TND also take the lengths and are otherwise the same.
template <typename... Lengths>
using ScorePrototype = int(AclTensor query, AclTensor key, AclTensor value, AclTensor real_shift,
                           AclTensor drop_mask, AclTensor padding_mask, AclTensor atten_mask,
                           AclIntArray prefix, Lengths... actual_seq_q_len_and_kv_len,
                           AclIntArray q_start_idx, AclIntArray kv_start_idx, double scale_value,
                           double keep_prob, int64_t pre_tokens, int64_t next_tokens,
                           int64_t head_num, char* input_layout, int64_t inner_precise,
                           int64_t sparse_mode, int64_t pse_type, AclTensor softmax_max,
                           AclTensor softmax_sum, AclTensor softmax_out, AclTensor attention_out);

template <typename... Lengths>
using ScoreGradPrototype = int(AclTensor query, AclTensor key, AclTensor value, AclTensor dy,
                               AclTensor pse_shift, AclTensor drop_mask, AclTensor padding_mask,
                               AclTensor atten_mask, AclTensor softmax_max, AclTensor softmax_sum,
                               AclTensor softmax_in, AclTensor attention_in, AclIntArray prefix,
                               Lengths... actual_seq_q_len_and_kv_len, AclIntArray q_start_idx,
                               AclIntArray kv_start_idx, double scale_value, double keep_prob,
                               int64_t pre_tokens, int64_t next_tokens, int64_t head_num,
                               char* input_layout, int64_t inner_precise, int64_t sparse_mode,
                               int64_t pse_type, AclTensor dq, AclTensor dk, AclTensor dv,
                               AclTensor dpse);

constexpr Launcher<FlashAttentionScore, ScorePrototype<>, 0> aclnn_score{.reuses_executor = true};
constexpr Launcher<FlashAttentionScore, ScorePrototype<AclIntArray, AclIntArray>, 1>
    aclnn_packed_score{.reuses_executor = true};
constexpr Launcher<FlashAttentionScoreGrad, ScoreGradPrototype<>, 0> aclnn_score_grad{
    .reuses_executor = true};
constexpr Launcher<FlashAttentionScoreGrad, ScoreGradPrototype<AclIntArray, AclIntArray>, 1>
    aclnn_packed_score_grad{.reuses_executor = true};

// Refuses calls of a graph that updates lengths, where the launch computes more than CANN does.
template <typename Op>
void check_updates(const Op& op, TakenByDevice device) {
  const auto check = [&](const char* argument, bool taken) {
    check_implemented(taken || GivenWorkspace::current() == nullptr, op.name, argument,
                      "expected None on this device in a call whose lengths a graph updates, got a "
                      "tensor");
  };
  check("query_rope", !op.extra.query_rope || device.ropes);
  check("sink", !op.extra.sink || device.sink);
}

void launch(const FlashAttentionScore& op, const FlashAttentionScore::Outputs& outputs) {
  const auto& [out, softmax_max, softmax_sum] = outputs;
  const auto& o = op.options;
  const DenseLists lists(op.query, op.key, o);
  const auto atten_mask = launched_mask(op.name, op.query, op.key, o, lists);
  // Never written: the function reserves this output.
  const auto softmax_out = new_tensor({0}, op.query.options());
  const auto call = [&](const auto& function, const auto&... lengths) {
    function(op.query, op.key, op.value, o.pse_shift, o.drop_mask, std::nullopt, atten_mask,
             lists.prefix, lengths..., o.q_start_idx, o.kv_start_idx, o.scale(), o.keep_prob,
             within_int32(o.pre_tokens), within_int32(o.next_tokens), o.heads().expect_int(),
             o.layout.text(), o.inner_precise, o.sparse_mode, o.pse_type, softmax_max, softmax_sum,
             softmax_out, out);
  };
  if (o.layout == Layout::TND) {
    call(aclnn_packed_score, lists.query_ends, lists.key_ends);
  } else {
    call(aclnn_score);
  }
}

void attend(const FlashAttentionScore& op, const FlashAttentionScore::Outputs& outputs) {
  const auto device = taken_by_device(op);
  check_updates(op, device);
  if (op.extra.query_rope && !device.ropes) {
    attend(join_ropes(op), outputs);
    return;
  }
  if (device.any()) {
    launch_extended(op, device, outputs);
  } else {
    launch(op, outputs);
  }
  if (op.extra.sink && !device.sink) {
    add_sink(op, outputs, DenseLists(op.query, op.key, op.options).query_ends);
  }
}

// Returns the call as the device takes it: a bias of all heads, a sink in float32.
template <typename Op>
Op launched(const Op& op) {
  auto call = op;
  call.options.pse_shift = launched_bias(op.options);
  if constexpr (requires { op.extra; }) {
    if (op.extra.sink) {
      call.extra.sink = op.extra.sink->to(at::kFloat);
    }
  }
  return call;
}

// Computes a padded batch as a pack. `axes`: what each output has.
template <auto compute, typename Op, size_t count>
void compute_padded(const Op& op, typename Op::Outputs& outputs,
                    const PaddedBatch::Axes (&axes)[count]) {
  const PaddedBatch batch(op);
  if (batch.complete()) {
    auto whole = op;
    whole.options.actual_seq_lengths_query.reset();
    whole.options.actual_seq_lengths_key.reset();
    compute(whole, outputs);
  } else if (batch.has_scores()) {
    batch.compute(op, outputs, compute, axes);
  } else {
    fill_outputs(outputs, 0);
  }
}

void flash_attention_score(const FlashAttentionScore& op, FlashAttentionScore::Outputs& outputs) {
  using enum PaddedBatch::Axes;
  if (op.options.padded()) {
    compute_padded<flash_attention_score>(op, outputs, {queries, statistics, statistics});
    return;
  }
  attend(launched(op), outputs);
}

void launch_grad(const FlashAttentionScoreGrad& op,
                 const FlashAttentionScoreGrad::Outputs& outputs) {
  const auto& [dq, dk, dv] = outputs;
  const auto& o = op.options;
  const DenseLists lists(op.query, op.key, o);
  const auto atten_mask = launched_mask(op.name, op.query, op.key, o, lists);
  // Never written, since the function has no gradient of pse_shift; torch_npu passes its sizes as
  // well.
  const auto dpse = o.pse_shift ? new_like(*o.pse_shift) : new_tensor({0}, op.query.options());
  const auto call = [&](const auto& function, const auto&... lengths) {
    function(op.query, op.key, op.value, op.dy, o.pse_shift, o.drop_mask, std::nullopt, atten_mask,
             op.softmax_max, op.softmax_sum, std::nullopt, op.attention_in, lists.prefix,
             lengths..., o.q_start_idx, o.kv_start_idx, o.scale(), o.keep_prob,
             within_int32(o.pre_tokens), within_int32(o.next_tokens), o.heads().expect_int(),
             o.layout.text(), o.inner_precise, o.sparse_mode, o.pse_type, dq, dk, dv, dpse);
  };
  if (o.layout == Layout::TND) {
    Fills fills;
    clear_padding(fills, lists.query_ends, dq);
    clear_padding(fills, lists.key_ends, dk);
    clear_padding(fills, lists.key_ends, dv);
    call(aclnn_packed_score_grad.with(fills), lists.query_ends, lists.key_ends);
  } else {
    call(aclnn_score_grad);
  }
}

constexpr int64_t kKeySize = 192;
constexpr int64_t kValueSize = 128;

// Returns whether CANN's host code refuses the gradient in this layout. Values of 128 beside keys
// of 192 are the one pair that it does not pad. Where rows are long it transposes values with the
// head size of the keys, which fails; in BNSD there is nothing to transpose.
bool is_refused_unless_bnsd(const FlashAttentionScoreGrad& op) {
  constexpr int64_t kFewestHeads = 256;
  static const bool refuses = runs_on(kA2A3);
  const auto layout = op.options.layout.value();
  if (!refuses || layout == Layout::BNSD || layout == Layout::TND || is_deterministic(false)) {
    return false;
  }
  const auto axes = axes_of(layout);
  const auto heads = op.options.heads().expect_int();
  if (heads * (layout == Layout::SBH ? op.query.size(axes.batch) : 1) < kFewestHeads) {
    return false;
  }
  const auto size_of_head = [&](const at::Tensor& tensor) {
    return axes.merged() ? tensor.size(-1) / heads : tensor.size(-1);
  };
  return size_of_head(op.query) == kKeySize && size_of_head(*op.dy) == kValueSize;
}

void flash_attention_score_grad_in_bnsd(const FlashAttentionScoreGrad& op,
                                        FlashAttentionScoreGrad::Outputs& outputs) {
  const auto layout = op.options.layout.value();
  const auto heads = op.options.heads().expect_int();
  const auto key_heads = key_heads_of(op.query, op.key, layout, heads);
  auto bnsd = op;
  bnsd.options.layout = LayoutArgument("BNSD");
  for (auto* tensor : {&bnsd.query, &*bnsd.dy, &bnsd.attention_in}) {
    *tensor = as_bnsd(*tensor, layout, heads).contiguous();
  }
  for (auto* tensor : {&bnsd.key, &bnsd.value}) {
    *tensor = as_bnsd(*tensor, layout, key_heads).contiguous();
  }
  auto gradients = bnsd.check_and_allocate();
  launch_grad(bnsd, gradients);
  const auto& [dq, dk, dv] = outputs;
  as_bnsd(dq, layout, heads).copy_(std::get<0>(gradients));
  as_bnsd(dk, layout, key_heads).copy_(std::get<1>(gradients));
  as_bnsd(dv, layout, key_heads).copy_(std::get<2>(gradients));
}

void differentiate(const FlashAttentionScoreGrad& op, FlashAttentionScoreGrad::Outputs& outputs) {
  if (is_refused_unless_bnsd(op)) {
    flash_attention_score_grad_in_bnsd(op, outputs);
  } else {
    launch_grad(op, outputs);
  }
}

void differentiate_extended(const FlashAttentionScoreExtendedGrad& op,
                            FlashAttentionScoreExtendedGrad::Outputs& outputs) {
  auto device = taken_by_device(op);
  check_updates(op, device);
  if (op.extra.query_rope && !device.ropes) {
    differentiate_joined(op, outputs, differentiate_extended);
    return;
  }
  const FlashAttentionScoreGrad plain{op.without_extra()};
  device.sink = device.sink && !is_refused_unless_bnsd(plain);
  if (device.any()) {
    launch_extended_grad(op, device, outputs);
  } else {
    FlashAttentionScoreGrad::Outputs gradients{std::get<0>(outputs), std::get<1>(outputs),
                                               std::get<2>(outputs)};
    differentiate(plain, gradients);
  }
  if (op.extra.sink && !device.sink) {
    differentiate_sink(op, std::get<3>(outputs),
                       DenseLists(op.query, op.key, op.options).query_ends);
  }
}

void flash_attention_score_extended_grad(const FlashAttentionScoreExtendedGrad& op,
                                         FlashAttentionScoreExtendedGrad::Outputs& outputs) {
  check_implemented(!op.pse_grad, op.name, "pse_grad",
                    "expected False on an NPU, whose functions have no gradient of pse_shift, got "
                    "True");
  if (op.options.padded()) {
    using enum PaddedBatch::Axes;
    compute_padded<flash_attention_score_extended_grad>(
        op, outputs, {queries, keys, keys, none, queries, keys, none});
    return;
  }
  if (op.d_softmax_sum) {
    auto of_out = op;
    of_out.d_softmax_sum.reset();
    add_gradients_of_statistics<0, 1, 3, 4, 5>(op.dy.has_value(), of_out, call_of_statistics(op),
                                               outputs, flash_attention_score_extended_grad);
    if (!op.dy) {
      fill_output(std::get<2>(outputs), 0);
    }
    return;
  }
  differentiate_extended(launched(op), outputs);
}

// The same operator, by its public name and without what that does not return.
void flash_attention_score_grad(const FlashAttentionScoreGrad& op,
                                FlashAttentionScoreGrad::Outputs& outputs) {
  const auto& [dq, dk, dv] = outputs;
  FlashAttentionScoreExtendedGrad::Outputs all{dq, dk, dv, {}, {}, {}, {}};
  flash_attention_score_extended_grad({{.query = op.query,
                                        .key = op.key,
                                        .value = op.value,
                                        .dy = op.dy,
                                        .softmax_max = op.softmax_max,
                                        .softmax_sum = op.softmax_sum,
                                        .attention_in = op.attention_in,
                                        .options = op.options,
                                        .extra = {},
                                        .d_softmax_sum = op.d_softmax_sum,
                                        .pse_grad = false}},
                                      all);
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) {
  register_kernel_and_relaunch<FlashAttentionScore, flash_attention_score>(m);
  register_kernel_and_relaunch<FlashAttentionScoreGrad, flash_attention_score_grad>(m);
  register_kernel_and_relaunch<FlashAttentionScoreExtendedGrad,
                               flash_attention_score_extended_grad>(m);
}

}  // namespace
}  // namespace ascend_attn::aclnn
