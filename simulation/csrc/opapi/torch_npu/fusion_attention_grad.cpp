// The versions of FlashAttentionScoreGrad that torch_npu calls beside V2.
#include "opapi/torch_npu/fusion_attention.h"

using namespace cann_sim;

namespace {

using torch::jit::Stack;

OperatorArguments statistics(const Call& call) {
  auto max = call.tensor("softmaxMaxOptional");
  auto sum = call.tensor("softmaxSumOptional");
  if (statistics_like_tokens(call)) {
    max = to_order_of_sequences(call, max);
    sum = to_order_of_sequences(call, sum);
  }
  return {{"softmax_max", max}, {"softmax_sum", sum}};
}

}  // namespace

Stack cann_sim::gradients_with_all(const Call& call, OperatorArguments others) {
  others.merge(statistics(call));
  return call.results(others);
}

namespace {

Stack in_either_order(const Call& call) { return gradients_with_all(call); }

Function version(std::string_view name, std::string_view schema_name, Arguments arguments,
                 Stack (*compute)(const Call&) = nullptr) {
  return {.name = name,
          .schema_name = schema_name,
          .workspace = 4096,
          .arguments = std::move(arguments),
          .device = {.check = check_tokens, .faults = kMaskFaults},
          .compute = compute};
}

constexpr std::string_view kPlain = "ascend::flash_attention_score_grad";
constexpr std::string_view kExtended = "ascend::_flash_attention_score_extended_grad";

const Arguments kRopeGradients{output("dqOut", 0), optional_output("dqRopeOut", 4),
                               output("dkOut", 1), optional_output("dkRopeOut", 5),
                               output("dvOut", 2), attribute("dpseOut")};

const auto grad_v1 =
    version("aclnnFlashAttentionScoreGrad", kPlain,
            join({kTensors, kSaved, kTerms, kStatistics, kPrefix, kScalars, kGradients}));
const auto grad_v3 = version("aclnnFlashAttentionScoreGradV3", kExtended,
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
                                   {optional_output("dsinkOut", 3)}}));
const auto unpadding_v1 =
    version("aclnnFlashAttentionUnpaddingScoreGrad", kPlain,
            join({kTensors, kSaved, kTerms, kStatistics, kPrefix, kLengths, kScalars, kGradients}));
const auto unpadding_v3 = version("aclnnFlashAttentionUnpaddingScoreGradV3", kExtended,
                                  join({kRopeTensors, kSaved, kTerms, kStatistics, kPrefix,
                                        kLengths, kStarts, kScalars, kPseType, kRopeGradients}));
const auto unpadding_v4 = version("aclnnFlashAttentionUnpaddingScoreGradV4", kPlain,
                                  join({kTensors, kSaved, kTerms, kStatistics, kPrefix, kLengths,
                                        kScalars, kGradients, kSoftmaxLayout}),
                                  in_either_order);
const auto unpadding_v5 = version("aclnnFlashAttentionUnpaddingScoreGradV5", kExtended,
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
                                        {optional_output("dsinkOut", 3)}}),
                                  in_either_order);

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
