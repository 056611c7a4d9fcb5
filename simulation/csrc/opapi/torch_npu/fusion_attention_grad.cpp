// The versions of FlashAttentionScoreGrad that torch_npu calls beside V2.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/exp.h>

#include "opapi/torch_npu/fusion_attention.h"

using namespace cann_sim;

namespace {

using torch::jit::Stack;

// A sink has no value: its score's gradient is the second term of the softmax's alone.
at::Tensor sink_gradient(const Call& call, const at::Tensor& max, const at::Tensor& sum) {
  const auto of_sink = at::exp(sinks_like(call, max) - max) / sum;
  const auto of_rows = heads_last(call, call.tensor("dy").to(at::kFloat)) *
                       heads_last(call, call.tensor("attentionInOptional").to(at::kFloat));
  return (statistic_of_heads(call, of_sink) * of_rows.sum(-1)).flatten(0, -2).sum(0).neg();
}

Stack dense(const Call& call) {
  auto gradients = call.results();
  gradients.emplace_back(
      sink_gradient(call, call.tensor("softmaxMaxOptional"), call.tensor("softmaxSumOptional")));
  return gradients;
}

// The parts of a gradient that belong to a tensor and to what was behind it.
void split_rope(const Call& call, std::string_view name, std::string_view rope, Stack& gradients,
                size_t i) {
  const auto both = gradients[i].toTensor();
  const auto width = call.tensor(name).size(-1);
  gradients[i] = both.narrow(-1, 0, width);
  gradients.emplace_back(call.optional_tensor(rope) ? both.narrow(-1, width, both.size(-1) - width)
                                                    : at::empty({0}, both.options()));
}

// dq, dk, dv, and the gradients of the two ropes.
Stack with_ropes(const Call& call, OperatorArguments others = {}) {
  others["query"] = with_rope(call, "query", "queryRopeOptional");
  others["key"] = with_rope(call, "key", "keyRopeOptional");
  auto gradients = call.results(others);
  split_rope(call, "query", "queryRopeOptional", gradients, 0);
  split_rope(call, "key", "keyRopeOptional", gradients, 1);
  return gradients;
}

Stack packed_with_rope(const Call& call) { return with_ropes(call); }

OperatorArguments statistics(const Call& call) {
  auto max = call.tensor("softmaxMaxOptional");
  auto sum = call.tensor("softmaxSumOptional");
  if (statistics_like_tokens(call)) {
    max = to_order_of_sequences(call, max);
    sum = to_order_of_sequences(call, sum);
  }
  return {{"softmax_max", max}, {"softmax_sum", sum}};
}

Stack packed_like_tokens(const Call& call) { return call.results(statistics(call)); }

}  // namespace

Stack cann_sim::gradients_with_all(const Call& call, OperatorArguments others) {
  const auto given = statistics(call);
  others.insert(given.begin(), given.end());
  auto gradients = with_ropes(call, std::move(others));
  if (call.optional_tensor("sinkOptional")) {
    auto max = given.at("softmax_max").toTensor();
    auto sum = given.at("softmax_sum").toTensor();
    if (call.is_tnd("inputLayout")) {
      max = to_order_of_tokens(call, max);
      sum = to_order_of_tokens(call, sum);
    }
    gradients.emplace_back(sink_gradient(call, max, sum));
  }
  return gradients;
}

namespace {

Stack packed_with_all(const Call& call) { return gradients_with_all(call); }

Function version(std::string_view name, Arguments arguments, Stack (*compute)(const Call&)) {
  return {.name = name,
          .schema_name = "ascend::flash_attention_score_grad",
          .workspace = 4096,
          .arguments = std::move(arguments),
          .device = {.check = check_tokens, .faults = kMaskFaults},
          .compute = compute};
}

// In the order of the results of `with_ropes`, and the sink's.
const Arguments kRopeGradients{output("dqOut", 0), optional_output("dqRopeOut", 3),
                               output("dkOut", 1), optional_output("dkRopeOut", 4),
                               output("dvOut", 2), attribute("dpseOut")};

const auto grad_v1 =
    version("aclnnFlashAttentionScoreGrad",
            join({kTensors, kSaved, kTerms, kStatistics, kPrefix, kScalars, kGradients}), nullptr);
const auto grad_v3 = version("aclnnFlashAttentionScoreGradV3",
                             join({kTensors,
                                   kSaved,
                                   kTerms,
                                   kStatistics,
                                   kSink,
                                   kPrefix,
                                   kStarts,
                                   kScalars,
                                   kPseType,
                                   kGradients,
                                   {optional_output("dsinkOut", 3)}}),
                             dense);
const auto unpadding_v1 =
    version("aclnnFlashAttentionUnpaddingScoreGrad",
            join({kTensors, kSaved, kTerms, kStatistics, kPrefix, kLengths, kScalars, kGradients}),
            nullptr);
const auto unpadding_v3 = version("aclnnFlashAttentionUnpaddingScoreGradV3",
                                  join({kRopeTensors, kSaved, kTerms, kStatistics, kPrefix,
                                        kLengths, kStarts, kScalars, kPseType, kRopeGradients}),
                                  packed_with_rope);
const auto unpadding_v4 = version("aclnnFlashAttentionUnpaddingScoreGradV4",
                                  join({kTensors, kSaved, kTerms, kStatistics, kPrefix, kLengths,
                                        kScalars, kGradients, kSoftmaxLayout}),
                                  packed_like_tokens);
const auto unpadding_v5 = version("aclnnFlashAttentionUnpaddingScoreGradV5",
                                  join({kRopeTensors,
                                        kSaved,
                                        kTerms,
                                        kStatistics,
                                        kSink,
                                        kPrefix,
                                        kLengths,
                                        kStarts,
                                        kScalars,
                                        kPseType,
                                        kSoftmaxLayout,
                                        kRopeGradients,
                                        {optional_output("dsinkOut", 5)}}),
                                  packed_with_all);

}  // namespace

extern "C" {

int aclnnFlashAttentionScoreGradGetWorkspaceSize(
    Tensor query, Tensor key, Tensor value, Tensor dy, Tensor pse, Tensor drop, Tensor padding,
    Tensor mask, Tensor max, Tensor sum, Tensor softmax_in, Tensor attention_in, IntArray prefix,
    double scale, double keep, int64_t pre, int64_t next, int64_t heads, char* layout,
    int64_t precise, int64_t mode, Tensor dq, Tensor dk, Tensor dv, Tensor dpse,
    uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(grad_v1, workspace_size, executor, query, key, value, dy, pse, drop, padding, mask,
                 max, sum, softmax_in, attention_in, prefix, scale, keep, pre, next, heads, layout,
                 precise, mode, dq, dk, dv, dpse);
}
CANN_SIM_SECOND_PHASE(aclnnFlashAttentionScoreGrad)

int aclnnFlashAttentionScoreGradV3GetWorkspaceSize(
    Tensor query, Tensor key, Tensor value, Tensor dy, Tensor pse, Tensor drop, Tensor padding,
    Tensor mask, Tensor max, Tensor sum, Tensor softmax_in, Tensor attention_in, Tensor sink,
    IntArray prefix, IntArray q_start, IntArray kv_start, double scale, double keep, int64_t pre,
    int64_t next, int64_t heads, char* layout, int64_t precise, int64_t mode, int64_t pse_type,
    Tensor dq, Tensor dk, Tensor dv, Tensor dpse, Tensor dsink, uint64_t* workspace_size,
    aclOpExecutor** executor) {
  return prepare(grad_v3, workspace_size, executor, query, key, value, dy, pse, drop, padding, mask,
                 max, sum, softmax_in, attention_in, sink, prefix, q_start, kv_start, scale, keep,
                 pre, next, heads, layout, precise, mode, pse_type, dq, dk, dv, dpse, dsink);
}
CANN_SIM_SECOND_PHASE(aclnnFlashAttentionScoreGradV3)

int aclnnFlashAttentionUnpaddingScoreGradGetWorkspaceSize(
    Tensor query, Tensor key, Tensor value, Tensor dy, Tensor pse, Tensor drop, Tensor padding,
    Tensor mask, Tensor max, Tensor sum, Tensor softmax_in, Tensor attention_in, IntArray prefix,
    IntArray query_lengths, IntArray key_lengths, double scale, double keep, int64_t pre,
    int64_t next, int64_t heads, char* layout, int64_t precise, int64_t mode, Tensor dq, Tensor dk,
    Tensor dv, Tensor dpse, uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(unpadding_v1, workspace_size, executor, query, key, value, dy, pse, drop, padding,
                 mask, max, sum, softmax_in, attention_in, prefix, query_lengths, key_lengths,
                 scale, keep, pre, next, heads, layout, precise, mode, dq, dk, dv, dpse);
}
CANN_SIM_SECOND_PHASE(aclnnFlashAttentionUnpaddingScoreGrad)

int aclnnFlashAttentionUnpaddingScoreGradV3GetWorkspaceSize(
    Tensor query, Tensor query_rope, Tensor key, Tensor key_rope, Tensor value, Tensor dy,
    Tensor pse, Tensor drop, Tensor padding, Tensor mask, Tensor max, Tensor sum, Tensor softmax_in,
    Tensor attention_in, IntArray prefix, IntArray query_lengths, IntArray key_lengths,
    IntArray q_start, IntArray kv_start, double scale, double keep, int64_t pre, int64_t next,
    int64_t heads, char* layout, int64_t precise, int64_t mode, int64_t pse_type, Tensor dq,
    Tensor dq_rope, Tensor dk, Tensor dk_rope, Tensor dv, Tensor dpse, uint64_t* workspace_size,
    aclOpExecutor** executor) {
  return prepare(unpadding_v3, workspace_size, executor, query, query_rope, key, key_rope, value,
                 dy, pse, drop, padding, mask, max, sum, softmax_in, attention_in, prefix,
                 query_lengths, key_lengths, q_start, kv_start, scale, keep, pre, next, heads,
                 layout, precise, mode, pse_type, dq, dq_rope, dk, dk_rope, dv, dpse);
}
CANN_SIM_SECOND_PHASE(aclnnFlashAttentionUnpaddingScoreGradV3)

int aclnnFlashAttentionUnpaddingScoreGradV4GetWorkspaceSize(
    Tensor query, Tensor key, Tensor value, Tensor dy, Tensor pse, Tensor drop, Tensor padding,
    Tensor mask, Tensor max, Tensor sum, Tensor softmax_in, Tensor attention_in, IntArray prefix,
    IntArray query_lengths, IntArray key_lengths, double scale, double keep, int64_t pre,
    int64_t next, int64_t heads, char* layout, int64_t precise, int64_t mode, Tensor dq, Tensor dk,
    Tensor dv, Tensor dpse, char* softmax_layout, uint64_t* workspace_size,
    aclOpExecutor** executor) {
  return prepare(unpadding_v4, workspace_size, executor, query, key, value, dy, pse, drop, padding,
                 mask, max, sum, softmax_in, attention_in, prefix, query_lengths, key_lengths,
                 scale, keep, pre, next, heads, layout, precise, mode, dq, dk, dv, dpse,
                 softmax_layout);
}
CANN_SIM_SECOND_PHASE(aclnnFlashAttentionUnpaddingScoreGradV4)

int aclnnFlashAttentionUnpaddingScoreGradV5GetWorkspaceSize(
    Tensor query, Tensor query_rope, Tensor key, Tensor key_rope, Tensor value, Tensor dy,
    Tensor pse, Tensor drop, Tensor padding, Tensor mask, Tensor max, Tensor sum, Tensor softmax_in,
    Tensor attention_in, Tensor sink, IntArray prefix, IntArray query_lengths, IntArray key_lengths,
    IntArray q_start, IntArray kv_start, double scale, double keep, int64_t pre, int64_t next,
    int64_t heads, char* layout, int64_t precise, int64_t mode, int64_t pse_type,
    char* softmax_layout, Tensor dq, Tensor dq_rope, Tensor dk, Tensor dk_rope, Tensor dv,
    Tensor dpse, Tensor dsink, uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(unpadding_v5, workspace_size, executor, query, query_rope, key, key_rope, value,
                 dy, pse, drop, padding, mask, max, sum, softmax_in, attention_in, sink, prefix,
                 query_lengths, key_lengths, q_start, kv_start, scale, keep, pre, next, heads,
                 layout, precise, mode, pse_type, softmax_layout, dq, dq_rope, dk, dk_rope, dv,
                 dpse, dsink);
}
CANN_SIM_SECOND_PHASE(aclnnFlashAttentionUnpaddingScoreGradV5)

}  // extern "C"
