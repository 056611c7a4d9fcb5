// The versions of FlashAttentionScore that torch_npu calls beside V2.
#include "opapi/torch_npu/fusion_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>

namespace cann_sim {

bool statistics_like_tokens(const Call& call) {
  return call.get<std::string>("softmaxLayout") == "same_as_input";
}

namespace {

// For every token and head, the row of the statistics in the order of the sequences.
at::Tensor rows_of_tokens(const Call& call, int64_t tokens, int64_t heads) {
  auto rows = at::arange(tokens * heads, at::kLong).view({tokens, heads});
  int64_t begin = 0;
  for (const auto end : call.get<std::vector<int64_t>>("actualSeqQLenOptional")) {
    if (end > begin) {
      const auto here = rows.narrow(0, begin, end - begin);
      here.copy_(here.clone().view({heads, end - begin}).t());
      begin = end;
    }
  }
  return rows.view(-1);
}

}  // namespace

at::Tensor to_order_of_tokens(const Call& call, const at::Tensor& statistics) {
  const auto rows = rows_of_tokens(call, statistics.size(0), statistics.size(1));
  return statistics.flatten(0, 1).index_select(0, rows).view(statistics.sizes());
}

at::Tensor to_order_of_sequences(const Call& call, const at::Tensor& statistics) {
  const auto rows = rows_of_tokens(call, statistics.size(0), statistics.size(1));
  const auto source = statistics.flatten(0, 1);
  return at::empty_like(source).index_copy_(0, rows, source).view(statistics.sizes());
}

namespace {

torch::jit::Stack like_tokens(const Call& call, torch::jit::Stack results) {
  if (statistics_like_tokens(call)) {
    for (const auto i : {1, 2}) {
      results[i] = to_order_of_tokens(call, results[i].toTensor());
    }
  }
  return results;
}

}  // namespace

torch::jit::Stack attention_with_all(const Call& call, const OperatorArguments& others) {
  return like_tokens(call, call.results(others));
}

namespace {

torch::jit::Stack in_either_order(const Call& call) {
  return attention_with_all(call, overwritten_arguments(call));
}

Function version(std::string_view name, Arguments arguments, void (*check)(const Call&),
                 torch::jit::Stack (*compute)(const Call&) = nullptr) {
  return {.name = name,
          .schema_name = "ascend::flash_attention_score",
          .workspace = 2048,
          .arguments = std::move(arguments),
          .device = {.check = check, .faults = kMaskFaults},
          .compute = compute};
}

const auto score_v1 = version("aclnnFlashAttentionScore",
                              join({kTensors, kTerms, kPrefix, kScalars, kOutputs}), check_tokens);
const auto score_v3 = version(
    "aclnnFlashAttentionScoreV3",
    join({kTensors, kTerms, kSink, kPrefix, kStarts, kScalars, kPseType, kOutputs}), check_tokens);
const auto var_len_v1 = version("aclnnFlashAttentionVarLenScore",
                                join({kTensors, kTerms, kPrefix, kLengths, kScalars, kOutputs}),
                                check_pack, attention_of_pack);
const auto var_len_v3 =
    version("aclnnFlashAttentionVarLenScoreV3",
            join({kRopeTensors, kTerms, kPrefix, kLengths, kStarts, kScalars, kPseType, kOutputs}),
            check_pack, attention_of_pack);
const auto var_len_v4 =
    version("aclnnFlashAttentionVarLenScoreV4",
            join({kTensors, kTerms, kPrefix, kLengths, kScalars, kSoftmaxLayout, kOutputs}),
            check_pack, in_either_order);
const auto var_len_v5 = version("aclnnFlashAttentionVarLenScoreV5",
                                join({kRopeTensors, kTerms, kSink, kPrefix, kLengths, kStarts,
                                      kScalars, kPseType, kSoftmaxLayout, kOutputs}),
                                check_pack, in_either_order);

}  // namespace
}  // namespace cann_sim

using namespace cann_sim;

extern "C" {

int aclnnFlashAttentionScoreGetWorkspaceSize(Tensor query, Tensor key, Tensor value, Tensor pse,
                                             Tensor drop, Tensor padding, Tensor mask,
                                             IntArray prefix, double scale, double keep,
                                             int64_t pre, int64_t next, int64_t heads, char* layout,
                                             int64_t precise, int64_t mode, Tensor max, Tensor sum,
                                             Tensor softmax, Tensor out, uint64_t* workspace_size,
                                             aclOpExecutor** executor) {
  return prepare(score_v1, workspace_size, executor, query, key, value, pse, drop, padding, mask,
                 prefix, scale, keep, pre, next, heads, layout, precise, mode, max, sum, softmax,
                 out);
}
CANN_SIM_SECOND_PHASE(aclnnFlashAttentionScore)

int aclnnFlashAttentionScoreV3GetWorkspaceSize(
    Tensor query, Tensor key, Tensor value, Tensor pse, Tensor drop, Tensor padding, Tensor mask,
    Tensor sink, IntArray prefix, IntArray q_start, IntArray kv_start, double scale, double keep,
    int64_t pre, int64_t next, int64_t heads, char* layout, int64_t precise, int64_t mode,
    int64_t pse_type, Tensor max, Tensor sum, Tensor softmax, Tensor out, uint64_t* workspace_size,
    aclOpExecutor** executor) {
  return prepare(score_v3, workspace_size, executor, query, key, value, pse, drop, padding, mask,
                 sink, prefix, q_start, kv_start, scale, keep, pre, next, heads, layout, precise,
                 mode, pse_type, max, sum, softmax, out);
}
CANN_SIM_SECOND_PHASE(aclnnFlashAttentionScoreV3)

int aclnnFlashAttentionVarLenScoreGetWorkspaceSize(
    Tensor query, Tensor key, Tensor value, Tensor pse, Tensor drop, Tensor padding, Tensor mask,
    IntArray prefix, IntArray query_lengths, IntArray key_lengths, double scale, double keep,
    int64_t pre, int64_t next, int64_t heads, char* layout, int64_t precise, int64_t mode,
    Tensor max, Tensor sum, Tensor softmax, Tensor out, uint64_t* workspace_size,
    aclOpExecutor** executor) {
  return prepare(var_len_v1, workspace_size, executor, query, key, value, pse, drop, padding, mask,
                 prefix, query_lengths, key_lengths, scale, keep, pre, next, heads, layout, precise,
                 mode, max, sum, softmax, out);
}
CANN_SIM_SECOND_PHASE(aclnnFlashAttentionVarLenScore)

int aclnnFlashAttentionVarLenScoreV3GetWorkspaceSize(
    Tensor query, Tensor query_rope, Tensor key, Tensor key_rope, Tensor value, Tensor pse,
    Tensor drop, Tensor padding, Tensor mask, IntArray prefix, IntArray query_lengths,
    IntArray key_lengths, IntArray q_start, IntArray kv_start, double scale, double keep,
    int64_t pre, int64_t next, int64_t heads, char* layout, int64_t precise, int64_t mode,
    int64_t pse_type, Tensor max, Tensor sum, Tensor softmax, Tensor out, uint64_t* workspace_size,
    aclOpExecutor** executor) {
  return prepare(var_len_v3, workspace_size, executor, query, query_rope, key, key_rope, value, pse,
                 drop, padding, mask, prefix, query_lengths, key_lengths, q_start, kv_start, scale,
                 keep, pre, next, heads, layout, precise, mode, pse_type, max, sum, softmax, out);
}
CANN_SIM_SECOND_PHASE(aclnnFlashAttentionVarLenScoreV3)

int aclnnFlashAttentionVarLenScoreV4GetWorkspaceSize(
    Tensor query, Tensor key, Tensor value, Tensor pse, Tensor drop, Tensor padding, Tensor mask,
    IntArray prefix, IntArray query_lengths, IntArray key_lengths, double scale, double keep,
    int64_t pre, int64_t next, int64_t heads, char* layout, int64_t precise, int64_t mode,
    char* softmax_layout, Tensor max, Tensor sum, Tensor softmax, Tensor out,
    uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(var_len_v4, workspace_size, executor, query, key, value, pse, drop, padding, mask,
                 prefix, query_lengths, key_lengths, scale, keep, pre, next, heads, layout, precise,
                 mode, softmax_layout, max, sum, softmax, out);
}
CANN_SIM_SECOND_PHASE(aclnnFlashAttentionVarLenScoreV4)

int aclnnFlashAttentionVarLenScoreV5GetWorkspaceSize(
    Tensor query, Tensor query_rope, Tensor key, Tensor key_rope, Tensor value, Tensor pse,
    Tensor drop, Tensor padding, Tensor mask, Tensor sink, IntArray prefix, IntArray query_lengths,
    IntArray key_lengths, IntArray q_start, IntArray kv_start, double scale, double keep,
    int64_t pre, int64_t next, int64_t heads, char* layout, int64_t precise, int64_t mode,
    int64_t pse_type, char* softmax_layout, Tensor max, Tensor sum, Tensor softmax, Tensor out,
    uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(var_len_v5, workspace_size, executor, query, query_rope, key, key_rope, value, pse,
                 drop, padding, mask, sink, prefix, query_lengths, key_lengths, q_start, kv_start,
                 scale, keep, pre, next, heads, layout, precise, mode, pse_type, softmax_layout,
                 max, sum, softmax, out);
}
CANN_SIM_SECOND_PHASE(aclnnFlashAttentionVarLenScoreV5)

}  // extern "C"
