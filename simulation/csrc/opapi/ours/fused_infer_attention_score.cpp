// FusedInferAttentionScore: V3, which npu_fused_infer_attention_score calls, V4 of its _v2, and V5
// of both on Ascend 950.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <limits>

#include "opapi/ours/infer_attention.h"

using namespace cann_sim;

namespace {

// The arguments of this library's operators.
OperatorArguments ours(const InferAttention& given) {
  OperatorArguments arguments{{"query", given.query},
                              {"key", given.key},
                              {"value", given.value},
                              {"num_heads", given.heads},
                              {"num_key_value_heads", given.key_heads},
                              {"layout", given.layout},
                              {"scale_value", given.scale},
                              {"pre_tokens", given.pre_tokens},
                              {"next_tokens", given.next_tokens},
                              {"sparse_mode", given.sparse_mode}};
  const auto add = [&](const char* name, const auto& value) {
    if (value) {
      arguments[name] = *value;
    }
  };
  add("atten_mask", given.mask);
  add("actual_seq_lengths_query", given.query_lengths);
  add("actual_seq_lengths_key", given.key_lengths);
  add("block_table", given.block_table);
  add("query_rope", given.query_rope);
  add("key_rope", given.key_rope);
  add("sink", given.sinks);
  if (given.key_scale) {
    add("key_antiquant_scale", given.key_scale);
    add("value_antiquant_scale", given.value_scale);
    arguments["key_antiquant_mode"] = given.scale_mode;
    arguments["value_antiquant_mode"] = given.scale_mode;
    add("dequant_scale_query", given.query_scale);
    arguments["query_quant_mode"] = given.query_mode;
  }
  return arguments;
}

// The int8 output is this library's, which rounds once.
torch::jit::Stack with_int8_output(const InferAttention& given, const Call& call) {
  TORCH_CHECK(!given.pse && !given.block_table && !given.query_rope && !given.sinks &&
                  !given.query_padding && !given.key_padding && !given.key_prefix,
              "the simulation computes quantScale2 without pseShift, blocks, ropes, sinks, padding "
              "sizes and prefixes only");
  auto arguments = ours(given);
  arguments["quant_scale2"] = call.tensor("quantScale2Optional");
  if (const auto offset = call.optional_tensor("quantOffset2Optional")) {
    arguments["quant_offset2"] = *offset;
  }
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

torch::jit::Stack infer(const InferAttention& given) {
  auto arguments = ours(given);
  arguments["return_softmax_lse"] = true;
  return call_operator("ascend::fused_infer_attention_score", "", arguments);
}

// Computes by the operator of this library, and then does to rows without keys what the device
// does: their log-sum-exp is a marker and leaves the sink out, and rows that the content of a mask
// masks whole are the mean of the values, unless innerPrecise asks for their correction.
torch::jit::Stack infer_as_device(const InferAttention& given, int64_t inner_precise) {
  auto results = infer(given);
  auto out = results[0].toTensor();
  auto log_sum_exp = results[1].toTensor();
  auto without_sinks = given;
  without_sinks.sinks.reset();
  auto without_mask = without_sinks;
  const bool full_mask = has_full_mask(given);
  if (full_mask) {
    without_mask.mask.reset();
    without_mask.sparse_mode = 0;
  }
  const auto is_dead = [](const InferAttention& arguments) {
    return infer(arguments)[1].toTensor().isneginf();
  };
  const auto without_keys = is_dead(without_mask);
  constexpr int64_t kCorrection = 2;
  if (full_mask && !given.sinks && (inner_precise & kCorrection) == 0) {
    const auto masked = is_dead(without_sinks).logical_and(without_keys.logical_not());
    if (masked.any().item<bool>()) {
      without_mask.scale = 0;
      const auto means = infer(without_mask)[0].toTensor();
      const auto layout = given.layout.substr(given.layout.find('_') + 1);
      auto rows = heads_first(out, layout, given.heads);
      rows.copy_(at::where(masked, heads_first(means, layout, given.heads), rows));
    }
  }
  log_sum_exp.masked_fill_(without_keys.logical_or(log_sum_exp.isneginf()),
                           given.log_sum_exp_without_keys);
  return results;
}

torch::jit::Stack compute(const Call& call) {
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

// Checks of the outputs and lists, as CANN documents them.

using Sizes = std::vector<int64_t>;

void check_outputs(const Call& call, const InferAttention& given) {
  const auto split = given.layout.find('_');
  const auto layout = given.layout.substr(0, split);
  const auto out_layout = split == std::string::npos ? layout : given.layout.substr(split + 1);
  const bool packed = is_packed(layout);
  const auto query = heads_first(given.query, layout, given.heads);
  const auto& out = call.get<TensorView>("attentionOut");
  const bool paged = given.block_table.has_value();
  // The value's heads: in pages of rows they share an axis, in fractal ones they are divided.
  const auto& value = given.value.sizes();
  const int64_t value_size = (paged ? value.size() == 3 : layout == "BSH")
                                 ? value.back() / given.key_heads
                             : paged && value.size() == 5 ? value[2] * value[4]
                                                          : value.back();
  auto expected = query.sizes().vec();
  expected.back() = value_size;
  TORCH_CHECK(heads_first(out.tensor(), out_layout, given.heads).sizes() == expected,
              "attentionOut: shape ", out.sizes);
  const bool quantized = call.find<TensorView>("quantScale2Optional") != nullptr;
  const auto of_query = given.query_scale ? ACL_BF16 : call.get<TensorView>("query").dtype;
  TORCH_CHECK(out.dtype == (quantized ? ACL_INT8 : of_query), "attentionOut: dtype ", out.dtype);
  if (!call.get<bool>("softmaxLseFlag")) {
    return;
  }
  const auto* lse = call.find<TensorView>("softmaxLse");
  TORCH_CHECK(lse, "softmaxLse: nullptr beside softmaxLseFlag");
  TORCH_CHECK(lse->dtype == ACL_FLOAT, "softmaxLse: dtype ", lse->dtype);
  expected = query.sizes().vec();
  expected.back() = 1;
  TORCH_CHECK(lse->sizes == (packed ? Sizes{query.size(2), given.heads, 1} : expected),
              "softmaxLse: shape ", lse->sizes);
}

void check_ends(const Sizes& ends, int64_t tokens, std::string_view name) {
  TORCH_CHECK(std::ranges::is_sorted(ends) && ends.front() >= 0, name, ": not ascending: ", ends);
  TORCH_CHECK(ends.back() == tokens, name, ": ends with ", ends.back(), ", not with T ", tokens);
}

void check_counts(const InferAttention::Lengths& lengths, int64_t batch, std::string_view name) {
  const auto count = lengths ? static_cast<int64_t>(lengths->size()) : 0;
  TORCH_CHECK(count <= 1 || count >= batch, name, ": ", count, " lengths for ", batch, " batches");
}

void check_lists(const InferAttention& given) {
  const auto layout = given.layout.substr(0, given.layout.find('_'));
  const auto query = heads_first(given.query, layout, given.heads);
  TORCH_CHECK(!given.block_table || given.key_lengths,
              "actualSeqLengthsKv: nullptr beside blockTable");
  if (!is_packed(layout)) {
    check_counts(given.query_lengths, query.size(0), "actualSeqLengths");
    check_counts(given.key_lengths, query.size(0), "actualSeqLengthsKv");
    return;
  }
  TORCH_CHECK(given.query_lengths && given.key_lengths, "actualSeqLengths: nullptr in layout ",
              given.layout);
  check_ends(*given.query_lengths, query.size(2), "actualSeqLengths");
  TORCH_CHECK(given.key_lengths->size() == given.query_lengths->size(),
              "actualSeqLengthsKv: another number of sequences");
  if (!given.block_table) {
    check_ends(*given.key_lengths, heads_first(given.key, layout, given.key_heads).size(2),
               "actualSeqLengthsKv");
  }
}

// Int8 keys and values are pages of fractals with scales, which no other ones have.
void check_scales(const Call& call, const InferAttention& given) {
  const auto& key = given.key;
  const bool is_int8 = key.scalar_type() == at::kChar;
  TORCH_CHECK((given.query.scalar_type() == at::kChar) == given.query_scale.has_value(),
              "dequantScaleQuery: not that of query");
  TORCH_CHECK(given.value.scalar_type() == key.scalar_type(), "value: another dtype than key");
  TORCH_CHECK(is_int8 == given.key_scale.has_value() && is_int8 == given.value_scale.has_value(),
              "keyAntiquantScale, valueAntiquantScale: not those of key");
  if (!is_int8) {
    return;
  }
  TORCH_CHECK(given.block_table && key.dim() == 5 && is_ours(given),
              "key: int8, not in pages of fractals");
  TORCH_CHECK(given.scale_mode == call.get<int64_t>("valueAntiquantMode"),
              "valueAntiquantMode: another one than keyAntiquantMode");
  constexpr int64_t kPerToken = 1;
  const bool is_float = given.scale_mode == kPerToken || given.query_scale;
  const auto expected = is_float ? at::kFloat : given.query.scalar_type();
  TORCH_CHECK(given.key_scale->scalar_type() == expected, "keyAntiquantScale: dtype ",
              given.key_scale->scalar_type());
}

void check(const Call& call) {
  const auto given = arguments_of(call);
  check_scales(call, given);
  const bool is_v5 = call.find<int64_t>("pseType");
  TORCH_CHECK(given.heads > 0 && given.heads % given.key_heads == 0, "numHeads: ", given.heads,
              " is no multiple of numKeyValueHeads ", given.key_heads);
  check_lists(given);
  check_outputs(call, given);
  constexpr int64_t kFirstCompressedMode = 2;
  TORCH_CHECK(
      !is_v5 || !given.mask || given.mask->dim() > 2 || given.sparse_mode >= kFirstCompressedMode,
      "attenMask: two axes in sparseMode 0 and 1");
  if (const auto* sink = call.find<TensorView>("learnableSinkOptional")) {
    TORCH_CHECK(sink->dtype == call.get<TensorView>("query").dtype, "learnableSink: dtype ",
                sink->dtype);
    TORCH_CHECK(sink->sizes == Sizes{given.heads}, "learnableSink: shape ", sink->sizes);
  }
}

const Function kFunction{.workspace = 1024, .device = {.check = check}, .compute = compute};

constexpr Dtypes kFloatOrBfloat16{ACL_FLOAT, ACL_BF16};
constexpr Dtypes kScales{ACL_FLOAT, ACL_FLOAT16, ACL_BF16};
constexpr Dtypes kHalfOrInt8{ACL_FLOAT16, ACL_BF16, ACL_INT8};
constexpr auto kInputs =
    join(input("query", "", kHalfOrInt8), input<TensorList>("key", "", kHalfOrInt8),
         input<TensorList>("value", "", kHalfOrInt8), optional_input("pseShiftOptional", "", kHalf),
         optional_input("attenMaskOptional", "", kInferMask),
         attribute<IntArray>("actualSeqLengthsOptional"),
         attribute<IntArray>("actualSeqLengthsKvOptional"),
         not_computed("deqScale1Optional", "quantScale1Optional", "deqScale2Optional"));
constexpr auto kNoOutputScales = not_computed("quantScale2Optional", "quantOffset2Optional");
constexpr auto kOutputScales = join(optional_input("quantScale2Optional", "", kFloatOrBfloat16),
                                    optional_input("quantOffset2Optional", "", kFloatOrBfloat16));
constexpr auto kMoreInputs = join(not_computed("antiquantScaleOptional", "antiquantOffsetOptional"),
                                  optional_input("blockTableOptional", "", kInt32),
                                  optional_input("queryPaddingSizeOptional", "", {ACL_INT64}),
                                  optional_input("kvPaddingSizeOptional", "", {ACL_INT64}),
                                  optional_input("keyAntiquantScaleOptional", "", kScales),
                                  not_computed("keyAntiquantOffsetOptional"),
                                  optional_input("valueAntiquantScaleOptional", "", kScales),
                                  not_computed("valueAntiquantOffsetOptional"),
                                  optional_input("keySharedPrefixOptional", "", kHalf),
                                  optional_input("valueSharedPrefixOptional", "", kHalf),
                                  attribute<IntArray>("actualSharedPrefixLenOptional"),
                                  optional_input("queryRopeOptional", "", kHalf),
                                  optional_input("keyRopeOptional", "", kHalf),
                                  not_computed("keyRopeAntiquantScaleOptional"));
constexpr auto kSinks = join(optional_input("dequantScaleQueryOptional", "", {ACL_FLOAT}),
                             optional_input("learnableSinkOptional"));
constexpr auto kAttributes =
    join(attribute<int64_t>("numHeads"), attribute<double>("scaleValue"),
         attribute<int64_t>("preTokens"), attribute<int64_t>("nextTokens"),
         attribute<char*>("inputLayout"), attribute<int64_t>("numKeyValueHeads"),
         attribute<int64_t>("sparseMode"), attribute<int64_t>("innerPrecise"),
         attribute<int64_t>("blockSize"), attribute<int64_t>("antiquantMode"),
         attribute<bool>("softmaxLseFlag"), attribute<int64_t>("keyAntiquantMode"),
         attribute<int64_t>("valueAntiquantMode"));
constexpr auto kQueryQuantMode = attribute<int64_t>("queryQuantMode");
constexpr auto kOutputs = join(output("attentionOut"), optional_output("softmaxLse"));

}  // namespace

CANN_SIM_FUNCTION(aclnnFusedInferAttentionScoreV3, kFunction, kInputs, kNoOutputScales, kMoreInputs,
                  kAttributes, kOutputs)
CANN_SIM_FUNCTION(aclnnFusedInferAttentionScoreV4, kFunction, kInputs, kNoOutputScales, kMoreInputs,
                  kSinks, kAttributes, kQueryQuantMode, kOutputs)
CANN_SIM_FUNCTION(aclnnFusedInferAttentionScoreV5, kFunction, kInputs, kOutputScales, kMoreInputs,
                  kSinks, not_computed<IntArray>("qStartIdxOptional", "kvStartIdxOptional"),
                  kAttributes, kQueryQuantMode, attribute<int64_t>("pseType"), kOutputs)

// For any lengths: what torch_npu reserves for a graph that updates them.
CANN_SIM_EXPORT(aclnnFusedInferAttentionScoreV3GetMaxWorkspaceSize, aclnnFusedInferAttentionScoreV3,
                cann_sim::FirstPhase<declared_aclnnFusedInferAttentionScoreV3>::run)
CANN_SIM_EXPORT(aclnnFusedInferAttentionScoreV4GetMaxWorkspaceSize, aclnnFusedInferAttentionScoreV4,
                cann_sim::FirstPhase<declared_aclnnFusedInferAttentionScoreV4>::run)
CANN_SIM_EXPORT(aclnnFusedInferAttentionScoreV5GetMaxWorkspaceSize, aclnnFusedInferAttentionScoreV5,
                cann_sim::FirstPhase<declared_aclnnFusedInferAttentionScoreV5>::run)
