// FlashAttentionScore V4 and its gradient: what torch_npu calls on Ascend 950, dense or packed.
#include "opapi/torch_npu/fusion_attention.h"

using namespace cann_sim;

namespace {

using torch::jit::Stack;
using Ends = std::vector<int64_t>;

// A tensor in the input layout as (..., N, D).
at::Tensor heads_last(const Call& call, const at::Tensor& x) {
  const auto& layout = call.get<std::string>("inputLayout");
  if (layout == "BSH" || layout == "SBH") {
    return x.unflatten(-1, {call.get<int64_t>("headNum"), -1});
  }
  return layout == "BNSD" ? x.transpose(1, 2) : x;
}

int64_t elements_of_scores(const Call& call) {
  const auto query = heads_last(call, call.tensor("query"));
  const auto heads = query.size(-2);
  if (!call.is_tnd("inputLayout")) {
    const auto key = call.tensor("key");
    const auto& layout = call.get<std::string>("inputLayout");
    const auto keys = key.size(layout == "SBH" ? 0 : layout == "BNSD" ? 2 : 1);
    return query.size(0) * heads * query.size(1) * keys;
  }
  const auto& query_ends = call.get<Ends>("actualSeqQLenOptional");
  const auto& key_ends = call.get<Ends>("actualSeqKvLenOptional");
  int64_t elements = 0;
  for (size_t i = 0; i < query_ends.size(); ++i) {
    const auto queries = query_ends[i] - (i ? query_ends[i - 1] : 0);
    const auto keys = key_ends.at(i) - (i ? key_ends[i - 1] : 0);
    elements += heads * queries * keys;
  }
  return elements;
}

// The kernel draws the dropout itself. Lengths of dense sequences come as empty lists. Before CANN
// 9.1 no kernel reads sinks.
OperatorArguments arguments_of(const Call& call) {
  OperatorArguments arguments;
  if (cann_version() < kCann91) {
    arguments["sink"] = c10::IValue();
  }
  if (!call.is_tnd("inputLayout")) {
    arguments["actual_seq_lengths_query"] = c10::IValue();
    arguments["actual_seq_lengths_key"] = c10::IValue();
  }
  const auto keep = call.get<double>("keepProb");
  if (keep < 1 && !call.optional_tensor("dropMaskOptional")) {
    constexpr int64_t kBitsPerByte = 8;
    const auto bytes = (elements_of_scores(call) + kBitsPerByte - 1) / kBitsPerByte;
    arguments["drop_mask"] =
        dropout_bits(call.get<int64_t>("seed"), call.get<int64_t>("offset"), keep, bytes);
  }
  return arguments;
}

Stack attention(const Call& call) { return attention_with_all(call, arguments_of(call)); }
Stack gradients(const Call& call) { return gradients_with_all(call, arguments_of(call)); }

const Arguments kRopes{optional_input("queryRopeOptional", "query_rope", kHalfOrFloat),
                       optional_input("keyRopeOptional", "key_rope", kHalfOrFloat)};
const Arguments kScales{not_computed("dScaleQOptional"), not_computed("dScaleKOptional"),
                        not_computed("dScaleVOptional")};
const Arguments kSeed{attribute("seed"), attribute("offset")};
const Arguments kOutDtype{attribute("outDtype")};

const Function score_v4{
    .name = "aclnnFlashAttentionScoreV4",
    .schema_name = "ascend::flash_attention_score",
    .workspace = 2048,
    .arguments = join({kTensors, kTerms, kRopes, kScales, kSink, kPrefix, kLengths, kStarts,
                       kScalars, kOutDtype, kPseType, kSoftmaxLayout, kSeed, kOutputs}),
    .device = {.check = check_tokens, .faults = kMaskFaults},
    .compute = attention};

// The attributes of kScalars, around the layout of the statistics.
const Arguments kScalarsOfGradient{attribute("scaleValue", "scale_value"),
                                   attribute("keepProb", "keep_prob"),
                                   attribute("preTokens", "pre_tokens"),
                                   attribute("nextTokens", "next_tokens"),
                                   attribute("headNum", "num_heads"),
                                   attribute("inputLayout", "layout"),
                                   attribute("softmaxLayout"),
                                   attribute("innerPrecise", "inner_precise"),
                                   attribute("sparseMode", "sparse_mode")};

const Function grad_v4{
    .name = "aclnnFlashAttentionScoreGradV4",
    .schema_name = "ascend::_flash_attention_score_extended_grad",
    .workspace = 4096,
    .arguments = join({kTensors,
                       kSaved,
                       kTerms,
                       kStatistics,
                       kSink,
                       kRopes,
                       kScales,
                       {not_computed("dScaleDyOptional"), not_computed("dScaleOOptional")},
                       kPrefix,
                       kLengths,
                       kStarts,
                       kScalarsOfGradient,
                       kPseType,
                       kSeed,
                       kOutDtype,
                       {output("dqOut", 0), output("dkOut", 1), output("dvOut", 2),
                        optional_output("dqRopeOut", 4), optional_output("dkRopeOut", 5),
                        attribute("dpseOut"), optional_output("dsinkOut", 3)}}),
    .device = {.check = check_tokens, .faults = kMaskFaults},
    .compute = gradients};

}  // namespace

extern "C" {

int aclnnFlashAttentionScoreV4GetWorkspaceSize(
    Tensor query, Tensor key, Tensor value, Tensor pse, Tensor drop, Tensor padding, Tensor mask,
    Tensor query_rope, Tensor key_rope, Tensor query_scale, Tensor key_scale, Tensor value_scale,
    Tensor sink, IntArray prefix, IntArray query_lengths, IntArray key_lengths, IntArray q_start,
    IntArray kv_start, double scale, double keep, int64_t pre, int64_t next, int64_t heads,
    char* layout, int64_t precise, int64_t mode, int64_t out_dtype, int64_t pse_type,
    char* softmax_layout, int64_t seed, int64_t offset, Tensor max, Tensor sum, Tensor softmax,
    Tensor out, uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(score_v4, workspace_size, executor, query, key, value, pse, drop, padding, mask,
                 query_rope, key_rope, query_scale, key_scale, value_scale, sink, prefix,
                 query_lengths, key_lengths, q_start, kv_start, scale, keep, pre, next, heads,
                 layout, precise, mode, out_dtype, pse_type, softmax_layout, seed, offset, max, sum,
                 softmax, out);
}
CANN_SIM_SECOND_PHASE(aclnnFlashAttentionScoreV4)

int aclnnFlashAttentionScoreGradV4GetWorkspaceSize(
    Tensor query, Tensor key, Tensor value, Tensor dy, Tensor pse, Tensor drop, Tensor padding,
    Tensor mask, Tensor max, Tensor sum, Tensor softmax_in, Tensor attention_in, Tensor sink,
    Tensor query_rope, Tensor key_rope, Tensor query_scale, Tensor key_scale, Tensor value_scale,
    Tensor dy_scale, Tensor out_scale, IntArray prefix, IntArray query_lengths,
    IntArray key_lengths, IntArray q_start, IntArray kv_start, double scale, double keep,
    int64_t pre, int64_t next, int64_t heads, char* layout, char* softmax_layout, int64_t precise,
    int64_t mode, int64_t pse_type, int64_t seed, int64_t offset, int64_t out_dtype, Tensor dq,
    Tensor dk, Tensor dv, Tensor dq_rope, Tensor dk_rope, Tensor dpse, Tensor dsink,
    uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(grad_v4, workspace_size, executor, query, key, value, dy, pse, drop, padding, mask,
                 max, sum, softmax_in, attention_in, sink, query_rope, key_rope, query_scale,
                 key_scale, value_scale, dy_scale, out_scale, prefix, query_lengths, key_lengths,
                 q_start, kv_start, scale, keep, pre, next, heads, layout, softmax_layout, precise,
                 mode, pse_type, seed, offset, out_dtype, dq, dk, dv, dq_rope, dk_rope, dpse,
                 dsink);
}
CANN_SIM_SECOND_PHASE(aclnnFlashAttentionScoreGradV4)

}  // extern "C"
