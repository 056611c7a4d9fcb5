// RingAttentionUpdate: two attentions over different keys made into one, from the maximum and the
// sum of each row's softmax.
#include <ATen/TensorOperators.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/maximum.h>

#include "opapi/core/opapi.h"

using namespace cann_sim;

namespace {

// Statistics of packed sequences stand as (N, S_b, 8), one sequence behind the other, unless
// their layout is TND.
at::Tensor by_token(const Call& call, const at::Tensor& statistics) {
  if (call.get<std::string>("inputSoftmaxLayoutOptional") == "TND") {
    return statistics;
  }
  const auto tokens = statistics.size(0);
  const auto heads = statistics.size(1);
  auto moved = statistics.clone();
  // From 0 on, unlike the ends that FlashAttentionScore takes.
  const auto bounds = call.optional_tensor("actualSeqQlenOptional");
  TORCH_CHECK(bounds, "actualSeqQlen is missing");
  const auto flat = statistics.reshape({tokens * heads, -1});
  for (int64_t i = 1; i < bounds->numel(); ++i) {
    const auto begin = (*bounds)[i - 1].item<int64_t>();
    const auto length = (*bounds)[i].item<int64_t>() - begin;
    const auto here = flat.narrow(0, begin * heads, length * heads);
    moved.narrow(0, begin, length).copy_(here.view({heads, length, -1}).transpose(0, 1));
  }
  return moved;
}

// Multiplies each row of an attention by its factor: rows are (..., N, 1) or, in (S, B, H), the
// heads of H.
at::Tensor scaled(const Call& call, std::string_view name, const at::Tensor& factor) {
  const auto x = call.tensor(name).to(at::kFloat);
  const auto lane = factor.select(-1, 0);
  if (call.get<std::string>("inputLayoutOptional") == "TND") {
    return x * by_token(call, factor).select(-1, 0).unsqueeze(-1);
  }
  const auto heads = lane.size(1);
  return (x.unflatten(-1, {heads, -1}) * lane.permute({2, 0, 1}).unsqueeze(-1)).flatten(-2);
}

torch::jit::Stack update(const Call& call) {
  const auto& layout = call.get<std::string>("inputLayoutOptional");
  TORCH_CHECK(layout == "SBH" || layout == "TND", "the simulation has no inputLayout ", layout);
  const auto previous = call.tensor("prevSoftmaxMax");
  const auto current = call.tensor("curSoftmaxMax");
  const auto max = at::maximum(previous, current);
  const auto previous_sum = call.tensor("prevSoftmaxSum") * at::exp(previous - max);
  const auto current_sum = call.tensor("curSoftmaxSum") * at::exp(current - max);
  const auto sum = previous_sum + current_sum;
  return {scaled(call, "prevAttnOut", previous_sum / sum) +
              scaled(call, "curAttnOut", current_sum / sum),
          max, sum};
}

}  // namespace

CANN_SIM_FUNCTION(aclnnRingAttentionUpdateV2, {.compute = update},
                  input("prevAttnOut", "", kHalfOrFloat), input("prevSoftmaxMax", "", kFloat),
                  input("prevSoftmaxSum", "", kFloat), input("curAttnOut", "", kHalfOrFloat),
                  input("curSoftmaxMax", "", kFloat), input("curSoftmaxSum", "", kFloat),
                  optional_input("actualSeqQlenOptional", "", {ACL_INT64}),
                  attribute<char*>("inputLayoutOptional"),
                  attribute<char*>("inputSoftmaxLayoutOptional"), output("attnOut"),
                  output("softmaxMaxOut"), output("softmaxSumOut"))
