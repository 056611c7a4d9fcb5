// FusedInferAttentionScore: V3, which npu_fused_infer_attention_score calls, V4 of its _v2, and V5
// of both on Ascend 950.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>

#include <limits>

#include "opapi/torch_npu/infer_attention.h"

using namespace cann_sim;

namespace {

const std::vector<aclDataType> kFloatOrBfloat16{ACL_FLOAT, ACL_BF16};

const Arguments kInputs{input("query", "", kHalf),
                        input("key", "", kHalf),
                        input("value", "", kHalf),
                        optional_input("pseShiftOptional", "", kHalf),
                        optional_input("attenMaskOptional", "", kInferMask),
                        attribute("actualSeqLengthsOptional"),
                        attribute("actualSeqLengthsKvOptional"),
                        not_computed("deqScale1Optional"),
                        not_computed("quantScale1Optional"),
                        not_computed("deqScale2Optional")};
const Arguments kNoOutputScales{not_computed("quantScale2Optional"),
                                not_computed("quantOffset2Optional")};
const Arguments kOutputScales{optional_input("quantScale2Optional", "", kFloatOrBfloat16),
                              optional_input("quantOffset2Optional", "", kFloatOrBfloat16)};
const Arguments kMoreInputs{not_computed("antiquantScaleOptional"),
                            not_computed("antiquantOffsetOptional"),
                            optional_input("blockTableOptional", "", kInt32),
                            optional_input("queryPaddingSizeOptional", "", {ACL_INT64}),
                            optional_input("kvPaddingSizeOptional", "", {ACL_INT64}),
                            not_computed("keyAntiquantScaleOptional"),
                            not_computed("keyAntiquantOffsetOptional"),
                            not_computed("valueAntiquantScaleOptional"),
                            not_computed("valueAntiquantOffsetOptional"),
                            optional_input("keySharedPrefixOptional", "", kHalf),
                            optional_input("valueSharedPrefixOptional", "", kHalf),
                            attribute("actualSharedPrefixLenOptional"),
                            optional_input("queryRopeOptional", "", kHalf),
                            optional_input("keyRopeOptional", "", kHalf),
                            not_computed("keyRopeAntiquantScaleOptional")};
const Arguments kSinks{not_computed("dequantScaleQueryOptional"),
                       optional_input("learnableSinkOptional", "")};
const Arguments kStarts{not_computed("qStartIdxOptional"), not_computed("kvStartIdxOptional")};
const Arguments kAttributes{
    attribute("numHeads"),          attribute("scaleValue"),     attribute("preTokens"),
    attribute("nextTokens"),        attribute("inputLayout"),    attribute("numKeyValueHeads"),
    attribute("sparseMode"),        attribute("innerPrecise"),   attribute("blockSize"),
    attribute("antiquantMode"),     attribute("softmaxLseFlag"), attribute("keyAntiquantMode"),
    attribute("valueAntiquantMode")};
const Arguments kQueryQuantMode{attribute("queryQuantMode")};
const Arguments kPseType{attribute("pseType")};
const Arguments kOutputs{output("attentionOut"), optional_output("softmaxLse")};

InferAttention arguments_of(const Call& call) {
  const auto heads = call.get<int64_t>("numHeads");
  const auto key_heads = call.get<int64_t>("numKeyValueHeads");
  return {.query = call.tensor("query"),
          .key = only_tensor(call, "key"),
          .value = only_tensor(call, "value"),
          .layout = call.get<std::string>("inputLayout"),
          .heads = heads,
          .key_heads = key_heads ? key_heads : heads,
          .scale = call.get<double>("scaleValue"),
          .out_sizes = call.get<TensorView>("attentionOut").sizes,
          .pse = call.optional_tensor("pseShiftOptional"),
          .mask = call.optional_tensor("attenMaskOptional"),
          .sparse_mode = call.get<int64_t>("sparseMode"),
          .pre_tokens = call.get<int64_t>("preTokens"),
          .next_tokens = call.get<int64_t>("nextTokens"),
          .query_lengths = lengths_of(call, "actualSeqLengthsOptional"),
          .key_lengths = lengths_of(call, "actualSeqLengthsKvOptional"),
          .block_table = call.optional_tensor("blockTableOptional"),
          .query_padding = call.optional_tensor("queryPaddingSizeOptional"),
          .key_padding = call.optional_tensor("kvPaddingSizeOptional"),
          .key_prefix = call.optional_tensor("keySharedPrefixOptional"),
          .value_prefix = call.optional_tensor("valueSharedPrefixOptional"),
          .prefix_length = lengths_of(call, "actualSharedPrefixLenOptional"),
          .query_rope = call.optional_tensor("queryRopeOptional"),
          .key_rope = call.optional_tensor("keyRopeOptional")};
}

torch::jit::Stack without_sinks(const Call& call) { return infer_attention(arguments_of(call)); }

// The int8 output is this library's, which rounds once.
torch::jit::Stack with_int8_output(const InferAttention& given, const Call& call) {
  TORCH_CHECK(!given.pse && !given.block_table && !given.query_rope && !given.sinks &&
                  !given.query_padding && !given.key_padding && !given.key_prefix,
              "the simulation computes quantScale2 without pseShift, blocks, ropes, sinks, padding "
              "sizes and prefixes only");
  OperatorArguments arguments{{"query", given.query},
                              {"key", given.key},
                              {"value", given.value},
                              {"num_heads", given.heads},
                              {"quant_scale2", call.tensor("quantScale2Optional")},
                              {"scale_value", given.scale},
                              {"pre_tokens", given.pre_tokens},
                              {"next_tokens", given.next_tokens},
                              {"layout", given.layout},
                              {"num_key_value_heads", given.key_heads},
                              {"sparse_mode", given.sparse_mode}};
  const auto add = [&](const char* name, const auto& value) {
    if (value) {
      arguments[name] = *value;
    }
  };
  add("atten_mask", given.mask);
  add("actual_seq_lengths_query", given.query_lengths);
  add("actual_seq_lengths_key", given.key_lengths);
  add("quant_offset2", call.optional_tensor("quantOffset2Optional"));
  auto results = call_operator("ascend::prompt_flash_attention", "", arguments);
  results.emplace_back(at::empty({0}, at::kFloat));
  return results;
}

// The kernel for decoding ignores what relates a query to its position, and the query's length.
void change_for_one_query(InferAttention& arguments) {
  const auto& sizes = arguments.query.sizes();
  const auto& layout = arguments.layout;
  const bool is_decoding =
      !arguments.query_rope && ((layout == "BNSD" && sizes[2] == 1) ||
                                ((layout == "BSND" || layout == "BSH") && sizes[1] == 1));
  if (!is_decoding) {
    return;
  }
  constexpr int64_t kFirstCompressedMode = 2;
  if (arguments.sparse_mode >= kFirstCompressedMode) {
    arguments.mask.reset();
  }
  arguments.sparse_mode = 0;
  arguments.pre_tokens = arguments.next_tokens = std::numeric_limits<int32_t>::max();
  arguments.query_lengths.reset();
  arguments.log_sum_exp_without_keys = std::numeric_limits<float>::lowest();
}

bool has_full_mask(const InferAttention& arguments) {
  constexpr int64_t kFirstCompressedMode = 2;
  return arguments.mask && arguments.sparse_mode < kFirstCompressedMode;
}

// Whether the operator of this library computes a call.
bool is_ours(const InferAttention& given) {
  const auto& layout = given.layout;
  const bool packed = layout[0] == 'T' || layout.starts_with("NTD");
  return !given.pse && !given.query_padding && !given.key_padding && !given.key_prefix &&
         layout != "NTD" && layout != "NSD" && !(packed && has_full_mask(given));
}

torch::jit::Stack infer(const InferAttention& given, bool with_mask, double scale,
                        const InferAttention::Optional& sinks) {
  OperatorArguments arguments{{"query", given.query},
                              {"key", given.key},
                              {"value", given.value},
                              {"num_heads", given.heads},
                              {"num_key_value_heads", given.key_heads},
                              {"layout", given.layout},
                              {"scale_value", scale},
                              {"pre_tokens", given.pre_tokens},
                              {"next_tokens", given.next_tokens},
                              {"sparse_mode", with_mask ? given.sparse_mode : 0},
                              {"return_softmax_lse", true}};
  const auto add = [&](const char* name, const auto& value) {
    if (value) {
      arguments[name] = *value;
    }
  };
  if (with_mask) {
    add("atten_mask", given.mask);
  }
  add("actual_seq_lengths_query", given.query_lengths);
  add("actual_seq_lengths_key", given.key_lengths);
  add("block_table", given.block_table);
  add("query_rope", given.query_rope);
  add("key_rope", given.key_rope);
  add("sink", sinks);
  return call_operator("ascend::fused_infer_attention_score", "", arguments);
}

// Computes by the operator of this library, and then does to rows without keys what the device
// does: their log-sum-exp is a marker and leaves the sink out, and rows that the content of a mask
// masks whole are the mean of the values, unless innerPrecise asks for their correction.
torch::jit::Stack infer_as_device(const InferAttention& given, int64_t inner_precise) {
  auto results = infer(given, true, given.scale, given.sinks);
  auto out = results[0].toTensor();
  auto log_sum_exp = results[1].toTensor();
  const bool full_mask = has_full_mask(given);
  const auto is_dead = [&](bool with_mask) {
    return infer(given, with_mask, given.scale, {})[1].toTensor().eq(
        -std::numeric_limits<double>::infinity());
  };
  const auto without_keys = is_dead(!full_mask);
  constexpr int64_t kCorrection = 2;
  if (full_mask && !given.sinks && (inner_precise & kCorrection) == 0) {
    const auto masked = is_dead(true).logical_and(without_keys.logical_not());
    if (masked.any().item<bool>()) {
      const auto means = infer(given, false, 0.0, {})[0].toTensor();
      const auto layout = given.layout.substr(given.layout.find('_') + 1);
      auto rows = heads_first(out, layout, given.heads);
      rows.copy_(at::where(masked, heads_first(means, layout, given.heads), rows));
    }
  }
  log_sum_exp.masked_fill_(without_keys.logical_or(log_sum_exp.isneginf()),
                           given.log_sum_exp_without_keys);
  return results;
}

torch::jit::Stack with_sinks(const Call& call) {
  auto arguments = arguments_of(call);
  change_for_one_query(arguments);
  if (call.optional_tensor("quantScale2Optional")) {
    return with_int8_output(arguments, call);
  }
  if (const auto sinks = call.optional_tensor("learnableSinkOptional")) {
    arguments.sinks = sinks->to(at::kFloat);
  }
  if (is_ours(arguments)) {
    return infer_as_device(arguments, call.get<int64_t>("innerPrecise"));
  }
  return infer_attention(arguments);
}

void check_v4(const Call& call) { check_infer(call, arguments_of(call), /*is_v5=*/false); }
void check_v5(const Call& call) { check_infer(call, arguments_of(call), /*is_v5=*/true); }

const Function v3{.name = "aclnnFusedInferAttentionScoreV3",
                  .workspace = 1024,
                  .arguments = join({kInputs, kNoOutputScales, kMoreInputs, kAttributes, kOutputs}),
                  .compute = without_sinks};
const Function v4{.name = "aclnnFusedInferAttentionScoreV4",
                  .workspace = 1024,
                  .arguments = join({kInputs, kNoOutputScales, kMoreInputs, kSinks, kAttributes,
                                     kQueryQuantMode, kOutputs}),
                  .device = {.check = check_v4},
                  .compute = with_sinks};
const Function v5{.name = "aclnnFusedInferAttentionScoreV5",
                  .workspace = 1024,
                  .arguments = join({kInputs, kOutputScales, kMoreInputs, kSinks, kStarts,
                                     kAttributes, kQueryQuantMode, kPseType, kOutputs}),
                  .device = {.check = check_v5},
                  .compute = with_sinks};

}  // namespace

extern "C" {

int aclnnFusedInferAttentionScoreV3GetWorkspaceSize(
    Tensor query, TensorList key, TensorList value, Tensor pse, Tensor mask, IntArray query_lengths,
    IntArray key_lengths, Tensor deq_scale1, Tensor quant_scale1, Tensor deq_scale2,
    Tensor quant_scale2, Tensor quant_offset2, Tensor antiquant_scale, Tensor antiquant_offset,
    Tensor block_table, Tensor query_padding, Tensor key_padding, Tensor key_antiquant_scale,
    Tensor key_antiquant_offset, Tensor value_antiquant_scale, Tensor value_antiquant_offset,
    Tensor key_prefix, Tensor value_prefix, IntArray prefix_length, Tensor query_rope,
    Tensor key_rope, Tensor key_rope_antiquant_scale, int64_t heads, double scale, int64_t pre,
    int64_t next, char* layout, int64_t key_heads, int64_t mode, int64_t precise,
    int64_t block_size, int64_t antiquant_mode, bool lse_flag, int64_t key_antiquant_mode,
    int64_t value_antiquant_mode, Tensor out, Tensor lse, uint64_t* workspace_size,
    aclOpExecutor** executor) {
  return prepare(v3, workspace_size, executor, query, key, value, pse, mask, query_lengths,
                 key_lengths, deq_scale1, quant_scale1, deq_scale2, quant_scale2, quant_offset2,
                 antiquant_scale, antiquant_offset, block_table, query_padding, key_padding,
                 key_antiquant_scale, key_antiquant_offset, value_antiquant_scale,
                 value_antiquant_offset, key_prefix, value_prefix, prefix_length, query_rope,
                 key_rope, key_rope_antiquant_scale, heads, scale, pre, next, layout, key_heads,
                 mode, precise, block_size, antiquant_mode, lse_flag, key_antiquant_mode,
                 value_antiquant_mode, out, lse);
}
CANN_SIM_SECOND_PHASE(aclnnFusedInferAttentionScoreV3)

int aclnnFusedInferAttentionScoreV4GetWorkspaceSize(
    Tensor query, TensorList key, TensorList value, Tensor pse, Tensor mask, IntArray query_lengths,
    IntArray key_lengths, Tensor deq_scale1, Tensor quant_scale1, Tensor deq_scale2,
    Tensor quant_scale2, Tensor quant_offset2, Tensor antiquant_scale, Tensor antiquant_offset,
    Tensor block_table, Tensor query_padding, Tensor key_padding, Tensor key_antiquant_scale,
    Tensor key_antiquant_offset, Tensor value_antiquant_scale, Tensor value_antiquant_offset,
    Tensor key_prefix, Tensor value_prefix, IntArray prefix_length, Tensor query_rope,
    Tensor key_rope, Tensor key_rope_antiquant_scale, Tensor dequant_scale_query, Tensor sinks,
    int64_t heads, double scale, int64_t pre, int64_t next, char* layout, int64_t key_heads,
    int64_t mode, int64_t precise, int64_t block_size, int64_t antiquant_mode, bool lse_flag,
    int64_t key_antiquant_mode, int64_t value_antiquant_mode, int64_t query_quant_mode, Tensor out,
    Tensor lse, uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(v4, workspace_size, executor, query, key, value, pse, mask, query_lengths,
                 key_lengths, deq_scale1, quant_scale1, deq_scale2, quant_scale2, quant_offset2,
                 antiquant_scale, antiquant_offset, block_table, query_padding, key_padding,
                 key_antiquant_scale, key_antiquant_offset, value_antiquant_scale,
                 value_antiquant_offset, key_prefix, value_prefix, prefix_length, query_rope,
                 key_rope, key_rope_antiquant_scale, dequant_scale_query, sinks, heads, scale, pre,
                 next, layout, key_heads, mode, precise, block_size, antiquant_mode, lse_flag,
                 key_antiquant_mode, value_antiquant_mode, query_quant_mode, out, lse);
}
CANN_SIM_SECOND_PHASE(aclnnFusedInferAttentionScoreV4)

int aclnnFusedInferAttentionScoreV5GetWorkspaceSize(
    Tensor query, TensorList key, TensorList value, Tensor pse, Tensor mask, IntArray query_lengths,
    IntArray key_lengths, Tensor deq_scale1, Tensor quant_scale1, Tensor deq_scale2,
    Tensor quant_scale2, Tensor quant_offset2, Tensor antiquant_scale, Tensor antiquant_offset,
    Tensor block_table, Tensor query_padding, Tensor key_padding, Tensor key_antiquant_scale,
    Tensor key_antiquant_offset, Tensor value_antiquant_scale, Tensor value_antiquant_offset,
    Tensor key_prefix, Tensor value_prefix, IntArray prefix_length, Tensor query_rope,
    Tensor key_rope, Tensor key_rope_antiquant_scale, Tensor dequant_scale_query, Tensor sinks,
    IntArray q_start, IntArray kv_start, int64_t heads, double scale, int64_t pre, int64_t next,
    char* layout, int64_t key_heads, int64_t mode, int64_t precise, int64_t block_size,
    int64_t antiquant_mode, bool lse_flag, int64_t key_antiquant_mode, int64_t value_antiquant_mode,
    int64_t query_quant_mode, int64_t pse_type, Tensor out, Tensor lse, uint64_t* workspace_size,
    aclOpExecutor** executor) {
  return prepare(v5, workspace_size, executor, query, key, value, pse, mask, query_lengths,
                 key_lengths, deq_scale1, quant_scale1, deq_scale2, quant_scale2, quant_offset2,
                 antiquant_scale, antiquant_offset, block_table, query_padding, key_padding,
                 key_antiquant_scale, key_antiquant_offset, value_antiquant_scale,
                 value_antiquant_offset, key_prefix, value_prefix, prefix_length, query_rope,
                 key_rope, key_rope_antiquant_scale, dequant_scale_query, sinks, q_start, kv_start,
                 heads, scale, pre, next, layout, key_heads, mode, precise, block_size,
                 antiquant_mode, lse_flag, key_antiquant_mode, value_antiquant_mode,
                 query_quant_mode, pse_type, out, lse);
}
CANN_SIM_SECOND_PHASE(aclnnFusedInferAttentionScoreV5)

// For any lengths: what torch_npu reserves for a graph that updates them.
decltype(aclnnFusedInferAttentionScoreV3GetWorkspaceSize)
    aclnnFusedInferAttentionScoreV3GetMaxWorkspaceSize
    __attribute__((alias("aclnnFusedInferAttentionScoreV3GetWorkspaceSize")));

decltype(aclnnFusedInferAttentionScoreV4GetWorkspaceSize)
    aclnnFusedInferAttentionScoreV4GetMaxWorkspaceSize
    __attribute__((alias("aclnnFusedInferAttentionScoreV4GetWorkspaceSize")));

decltype(aclnnFusedInferAttentionScoreV5GetWorkspaceSize)
    aclnnFusedInferAttentionScoreV5GetMaxWorkspaceSize
    __attribute__((alias("aclnnFusedInferAttentionScoreV5GetWorkspaceSize")));

}  // extern "C"
