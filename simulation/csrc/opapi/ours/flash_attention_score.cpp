// FlashAttentionScore and its gradient, in all versions: torch_npu calls the same ones. Prototypes:
// docs/operators/flash_attention_score.md.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/logical_or.h>

#include <algorithm>
#include <limits>
#include <span>

#include "ascendcl/runtime.h"
#include "opapi/core/opapi.h"
#include "opapi/torch_npu/dropout.h"

using namespace cann_sim;

namespace {

using torch::jit::Stack;
using Ends = std::vector<int64_t>;

bool is_a2_or_a3() { return product() == Product::a2 || product() == Product::a3; }

// The band of mode 4 is computed in int32, and wraps around.
void check_tokens(const Call& call) {
  constexpr int64_t kBand = 4;
  for (const auto* name : {"preTokens", "nextTokens"}) {
    const auto tokens = call.get<int64_t>(name);
    const bool fits = tokens >= std::numeric_limits<int32_t>::min() &&
                      tokens <= std::numeric_limits<int32_t>::max();
    TORCH_CHECK(!is_a2_or_a3() || call.get<int64_t>("sparseMode") != kBand || fits, name,
                " overflows: ", tokens);
  }
}

// The host code of A2 and A3 copies the lengths of a forward call into arrays of this size, without
// a check. It counts the tokens by what the arrays hold.
constexpr size_t kLengthsOnHost = 20000;

int64_t sum_of(const Ends& ends) {
  const auto counted = is_a2_or_a3() ? std::min(ends.size(), kLengthsOnHost) : ends.size();
  return ends.empty() ? 0 : *std::ranges::max_element(std::span(ends).first(counted));
}

// The checks of isSupportMultiInput in CANN's aclnn_flash_attention_score.cpp, in its order, and
// that of the tiling of Ascend 950, which has kernels for one pair of sizes.
void check_ropes(const Call& call) {
  const auto* query_rope = call.find<TensorView>("queryRopeOptional");
  const auto* key_rope = call.find<TensorView>("keyRopeOptional");
  if (!query_rope && !key_rope) {
    return;
  }
  if (!query_rope || !key_rope) {
    throw Refusal(kNullPointer, "one of the ropes is nullptr");
  }
  const auto& query = call.get<TensorView>("query");
  const auto& value = call.get<TensorView>("value");
  const auto size = query.sizes.back();
  if (product() == Product::p950) {
    const auto& layout = call.get<std::string>("inputLayout");
    const auto heads = layout == "BSH" || layout == "SBH" ? call.get<int64_t>("headNum") : 1;
    TORCH_CHECK(size == 128 * heads && query_rope->sizes.back() == 64 * heads,
                "ropes: D is not 128 or Dr is not 64");
    return;
  }
  TORCH_CHECK(query_rope->sizes.back() <= size && key_rope->sizes.back() <= size,
              "ropes are larger than heads");
  for (const auto* name : {"query", "queryRopeOptional", "key", "keyRopeOptional", "value"}) {
    TORCH_CHECK(call.get<TensorView>(name).dtype == ACL_BF16, name,
                " beside ropes is not bfloat16");
  }
  TORCH_CHECK(call.get<int64_t>("sparseMode") != 6, "ropes in sparseMode 6");
  if (!call.find<TensorView>("attenMaskOptional")) {
    throw Refusal(kNullPointer, "ropes without attenMaskOptional");
  }
  TORCH_CHECK(!call.find<TensorView>("pseShiftOptional") &&
                  !call.find<TensorView>("dropMaskOptional") && call.get<double>("keepProb") >= 1,
              "ropes beside pseShiftOptional or a dropout");
  const auto aligned = size < 196 || size == 448 ? 16 : 128;
  TORCH_CHECK(size % aligned == 0 && value.sizes.back() == size,
              "ropes beside heads that the host would pad");
}

void check_score(const Call& call) {
  check_tokens(call);
  check_ropes(call);
}

// The gradient has further checks in aclnn_flash_attention_score_grad.cpp.
void check_gradient(const Call& call) {
  check_score(call);
  const auto& query = call.get<TensorView>("query");
  TORCH_CHECK(!call.find<TensorView>("sinkOptional") || query.dtype != ACL_FLOAT,
              "sinkOptional: query of float is not supported");
  // Its GetInputShapeInfo pads heads of 192 to 256, and transposes tensors in which tokens are more
  // than 65,535 elements apart. It reshapes the value for that by the key's heads, to which it has
  // padded the value, except one of 128 beside a key of 192 without determinism.
  const auto& layout = call.get<std::string>("inputLayout");
  const auto heads = call.get<int64_t>("headNum");
  if (product() == Product::p950 || call.launch().deterministic || heads <= 0 || layout == "BNSD" ||
      layout == "TND") {
    return;
  }
  const auto& key = call.get<TensorView>("key").sizes;
  const bool joined = layout != "BSND";
  const auto size = query.sizes.back() / (joined ? heads : 1);
  const auto key_heads = joined ? key.back() / std::max<int64_t>(size, 1) : key[2];
  const auto value_size =
      call.get<TensorView>("value").sizes.back() / (joined ? std::max<int64_t>(key_heads, 1) : 1);
  const auto apart = (layout == "SBH" ? query.sizes[1] : 1) * heads * 256;
  if (size == 192 && value_size == 128 && apart > 65535) {
    throw Refusal(kNullPointer, c10::str("value of 128 beside a key of 192 in layout ", layout,
                                         ", with tokens that are ", apart, " elements apart"));
  }
}

// A pack with tokens behind its sequences on both sides says so by a last element of 0.
void check_pack(const Call& call) {
  check_score(call);

  for (const auto* name : {"actualSeqQLenOptional", "actualSeqKvLenOptional"}) {
    TORCH_CHECK(call.find<Ends>(name), name, " is nullptr");
  }
  const auto& query_ends = call.get<Ends>("actualSeqQLenOptional");
  const auto& key_ends = call.get<Ends>("actualSeqKvLenOptional");
  const bool padded = call.get<TensorView>("query").sizes[0] > sum_of(query_ends) &&
                      call.get<TensorView>("key").sizes[0] > sum_of(key_ends);
  const bool said =
      !query_ends.empty() && query_ends.back() == 0 && !key_ends.empty() && key_ends.back() == 0;
  TORCH_CHECK(!is_a2_or_a3() || cann_version() < kCann90 || !padded || said,
              "the last of the lengths should be 0 in a padded pack");
}

// The first query and key beyond the tokens that a mask (..., Sq, Skv) lets through.
std::string first_beyond(const at::Tensor& mask, int64_t queries, int64_t keys, int64_t pre,
                         int64_t next) {
  if (queries > mask.size(-2) || keys > mask.size(-1)) {
    return {};
  }
  const auto options = at::TensorOptions().dtype(at::kLong);
  const auto distance = at::arange(keys, options) - at::arange(queries, options).unsqueeze(1);
  const auto beyond = at::logical_or(distance.gt(next), distance.lt(-pre));
  const auto part = mask.narrow(-2, 0, queries).narrow(-1, 0, keys);
  const auto found = at::logical_and(beyond, part.eq(0)).nonzero();
  if (found.size(0) == 0) {
    return {};
  }
  const auto place = found[0];
  return c10::str("query ", place[-2].item<int64_t>(), " sees key ", place[-1].item<int64_t>(),
                  ", which preTokens ", pre, " and nextTokens ", next,
                  " exclude and attenMask does not: the device computes it");
}

// In mode 0 the tokens only let the kernel leave out whole tiles: what the mask alone lets through
// within a tile is computed.
std::string mask_beyond_tokens(const Call& call) {
  const auto mask = call.optional_tensor("attenMaskOptional");
  if (!mask || mask->numel() == 0 || call.get<int64_t>("sparseMode") != 0) {
    return {};
  }
  constexpr auto kMost = int64_t{1} << 40;
  const auto pre = std::clamp(call.get<int64_t>("preTokens"), -kMost, kMost);
  const auto next = std::clamp(call.get<int64_t>("nextTokens"), -kMost, kMost);
  const auto& layout = call.get<std::string>("inputLayout");
  const auto& query = call.get<TensorView>("query").sizes;
  const auto& key = call.get<TensorView>("key").sizes;
  if (layout != "TND") {
    const auto axis = layout.find('S');
    return first_beyond(*mask, query.at(axis), key.at(axis), pre, next);
  }
  const auto& query_ends = call.get<Ends>("actualSeqQLenOptional");
  const auto& key_ends = call.get<Ends>("actualSeqKvLenOptional");
  for (size_t b = 0; b < query_ends.size(); ++b) {
    const auto queries = query_ends[b] - (b ? query_ends[b - 1] : 0);
    const auto keys = key_ends.at(b) - (b ? key_ends[b - 1] : 0);
    auto text =
        first_beyond(*mask, std::max<int64_t>(queries, 0), std::max<int64_t>(keys, 0), pre, next);
    if (!text.empty()) {
      return c10::str("sequence ", b, ": ", text);
    }
  }
  return {};
}

// The statistics of packed sequences stand as (N, S_b, 8), one sequence behind the other, or with
// `softmaxLayout` "same_as_input" as the tokens do: (T, N, 8).
bool statistics_like_tokens(const Call& call) {
  const auto* layout = call.find<std::string>("softmaxLayout");
  return layout && *layout == "same_as_input";
}

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

at::Tensor to_order_of_tokens(const Call& call, const at::Tensor& statistics) {
  const auto rows = rows_of_tokens(call, statistics.size(0), statistics.size(1));
  return statistics.flatten(0, 1).index_select(0, rows).view(statistics.sizes());
}

at::Tensor to_order_of_sequences(const Call& call, const at::Tensor& statistics) {
  const auto rows = rows_of_tokens(call, statistics.size(0), statistics.size(1));
  const auto source = statistics.flatten(0, 1);
  return at::empty_like(source).index_copy_(0, rows, source).view(statistics.sizes());
}

int64_t elements_of_scores(const Call& call) {
  const auto heads = call.get<int64_t>("headNum");
  const auto& layout = call.get<std::string>("inputLayout");
  if (layout != "TND") {
    const auto& query = call.get<TensorView>("query").sizes;
    const auto axis = layout.find('S');
    return query.at(layout.find('B')) * heads * query.at(axis) *
           call.get<TensorView>("key").sizes.at(axis);
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

// The arguments that the kernels of Ascend 950 take in the place of a call's, by its version 4.
// They draw the dropout themselves. Lengths of dense sequences come as empty lists. Before CANN 9.1
// no kernel reads sinks.
OperatorArguments arguments_of_v4(const Call& call) {
  OperatorArguments arguments;
  if (!call.find<int64_t>("seed")) {
    return arguments;
  }
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

Stack attention(const Call& call) {
  auto arguments = arguments_of_v4(call);
  const auto* key_ends = call.find<Ends>("actualSeqKvLenOptional");
  if (is_a2_or_a3() && key_ends && key_ends->size() > kLengthsOnHost) {
    // Behind the arrays of lengths lies the scale, which further key lengths overwrite.
    arguments["scale_value"] = 0.0;
  }
  auto results = call.results(arguments);
  if (statistics_like_tokens(call)) {
    for (const auto i : {1, 2}) {
      results[i] = to_order_of_tokens(call, results[i].toTensor());
    }
  }
  return results;
}

Stack gradients(const Call& call) {
  auto arguments = arguments_of_v4(call);
  if (statistics_like_tokens(call)) {
    for (const auto& [schema, name] :
         {std::pair("softmax_max", "softmaxMaxOptional"), {"softmax_sum", "softmaxSumOptional"}}) {
      arguments[schema] = to_order_of_sequences(call, call.tensor(name));
    }
  }
  return call.results(arguments);
}

const std::vector<KernelFault> kMaskFaults{{Harm::results, mask_beyond_tokens}};
const Function kScore{.schema_name = "ascend::flash_attention_score",
                      .workspace = 2048,
                      .device = {.check = check_score, .faults = kMaskFaults},
                      .compute = attention,
                      .status_of_copy = kNullPointer};
const Function kScoreOfPack{.schema_name = kScore.schema_name,
                            .workspace = kScore.workspace,
                            .device = {.check = check_pack, .faults = kMaskFaults},
                            .compute = attention,
                            .status_of_copy = kNullPointer};
const Function kGrad{.schema_name = "ascend::flash_attention_score_grad",
                     .workspace = 4096,
                     .device = {.check = check_gradient, .faults = kMaskFaults},
                     .compute = gradients,
                     .status_of_copy = kNullPointer};
const Function kExtendedGrad{.schema_name = "ascend::_flash_attention_score_extended_grad",
                             .workspace = 4096,
                             .device = kGrad.device,
                             .compute = gradients,
                             .status_of_copy = kNullPointer};

constexpr auto kQuery = input("query", "query", kHalfOrFloat);
constexpr auto kKey = input("key", "key", kHalfOrFloat);
constexpr auto kValue = input("value", "value", kHalfOrFloat);
constexpr auto kQueryRope = optional_input("queryRopeOptional", "query_rope", kHalfOrFloat);
constexpr auto kKeyRope = optional_input("keyRopeOptional", "key_rope", kHalfOrFloat);
constexpr auto kTensors = join(kQuery, kKey, kValue);
constexpr auto kRopeTensors = join(kQuery, kQueryRope, kKey, kKeyRope, kValue);

constexpr auto kTerms =
    join(optional_input("pseShiftOptional", "pse_shift", kHalfOrFloat),
         optional_input("dropMaskOptional", "drop_mask", {ACL_UINT8}),
         not_computed("paddingMaskOptional"),
         optional_input("attenMaskOptional", "atten_mask", {ACL_BOOL, ACL_UINT8}));
constexpr auto kSink = optional_input("sinkOptional", "sink", kFloat);
constexpr auto kScales = not_computed("dScaleQOptional", "dScaleKOptional", "dScaleVOptional");
constexpr auto kPrefix = attribute<IntArray>("prefixOptional", "prefix");
constexpr auto kLengths =
    join(attribute<IntArray>("actualSeqQLenOptional", "actual_seq_lengths_query"),
         attribute<IntArray>("actualSeqKvLenOptional", "actual_seq_lengths_key"));
constexpr auto kStarts = join(attribute<IntArray>("qStartIdxOptional", "q_start_idx"),
                              attribute<IntArray>("kvStartIdxOptional", "kv_start_idx"));
constexpr auto kScaleToLayout = join(
    attribute<double>("scaleValue", "scale_value"), attribute<double>("keepProb", "keep_prob"),
    attribute<int64_t>("preTokens", "pre_tokens"), attribute<int64_t>("nextTokens", "next_tokens"),
    attribute<int64_t>("headNum", "num_heads"), attribute<char*>("inputLayout", "layout"));
constexpr auto kPreciseAndMode = join(attribute<int64_t>("innerPrecise", "inner_precise"),
                                      attribute<int64_t>("sparseMode", "sparse_mode"));
constexpr auto kScalars = join(kScaleToLayout, kPreciseAndMode);
constexpr auto kPseType = attribute<int64_t>("pseType", "pse_type");
constexpr auto kOutDtype = attribute<int64_t>("outDtype");
constexpr auto kSoftmaxLayout = attribute<char*>("softmaxLayout");
constexpr auto kSeed = join(attribute<int64_t>("seed"), attribute<int64_t>("offset"));
// The operator gives out first. softmaxOutOut and dpseOut are never written.
constexpr auto kOutputs =
    join(output("softmaxMaxOut", 1).in(kFloat), output("softmaxSumOut", 2).in(kFloat),
         attribute<Tensor>("softmaxOutOut"), output("attentionOutOut", 0).of_dtype_of("query"));

constexpr auto kSaved = input("dy", "dy", kHalfOrFloat);
constexpr auto kStatistics =
    join(input("softmaxMaxOptional", "softmax_max", kFloat),
         input("softmaxSumOptional", "softmax_sum", kFloat), attribute<Tensor>("softmaxInOptional"),
         input("attentionInOptional", "attention_in", kHalfOrFloat));
constexpr auto kOfQuery = output("dqOut", 0).like("query");
constexpr auto kOfKey = output("dkOut", 1).like("key");
constexpr auto kOfValue = output("dvOut", 2).like("value");
constexpr auto kOfPse = attribute<Tensor>("dpseOut").like("pseShiftOptional");
constexpr auto kOfSink = optional_output("dsinkOut", 3).like("sinkOptional");
constexpr auto kOfQueryRope = optional_output("dqRopeOut", 4).like("queryRopeOptional");
constexpr auto kOfKeyRope = optional_output("dkRopeOut", 5).like("keyRopeOptional");
constexpr auto kGradients = join(kOfQuery, kOfKey, kOfValue, kOfPse);
constexpr auto kRopeGradients = join(kOfQuery, kOfQueryRope, kOfKey, kOfKeyRope, kOfValue, kOfPse);

constexpr auto kDense = join(kTensors, kTerms);
constexpr auto kRoped = join(kRopeTensors, kTerms);
constexpr auto kOfDense = join(kTensors, kSaved, kTerms, kStatistics);
constexpr auto kOfRoped = join(kRopeTensors, kSaved, kTerms, kStatistics);

}  // namespace

CANN_SIM_FUNCTION(aclnnFlashAttentionScore, kScore, kDense, kPrefix, kScalars, kOutputs)
CANN_SIM_FUNCTION(aclnnFlashAttentionScoreV2, kScore, kDense, kPrefix, kStarts, kScalars, kPseType,
                  kOutputs)
CANN_SIM_FUNCTION(aclnnFlashAttentionScoreV3, kScore, kDense, kSink, kPrefix, kStarts, kScalars,
                  kPseType, kOutputs)
CANN_SIM_FUNCTION(aclnnFlashAttentionScoreV4, kScore, kDense, kQueryRope, kKeyRope, kScales, kSink,
                  kPrefix, kLengths, kStarts, kScalars, kOutDtype, kPseType, kSoftmaxLayout, kSeed,
                  kOutputs)
CANN_SIM_FUNCTION(aclnnFlashAttentionVarLenScore, kScoreOfPack, kDense, kPrefix, kLengths, kScalars,
                  kOutputs)
CANN_SIM_FUNCTION(aclnnFlashAttentionVarLenScoreV2, kScoreOfPack, kDense, kPrefix, kLengths,
                  kStarts, kScalars, kPseType, kOutputs)
CANN_SIM_FUNCTION(aclnnFlashAttentionVarLenScoreV3, kScoreOfPack, kRoped, kPrefix, kLengths,
                  kStarts, kScalars, kPseType, kOutputs)
CANN_SIM_FUNCTION(aclnnFlashAttentionVarLenScoreV4, kScoreOfPack, kDense, kPrefix, kLengths,
                  kScalars, kSoftmaxLayout, kOutputs)
CANN_SIM_FUNCTION(aclnnFlashAttentionVarLenScoreV5, kScoreOfPack, kRoped, kSink, kPrefix, kLengths,
                  kStarts, kScalars, kPseType, kSoftmaxLayout, kOutputs)

CANN_SIM_FUNCTION(aclnnFlashAttentionScoreGrad, kGrad, kOfDense, kPrefix, kScalars, kGradients)
CANN_SIM_FUNCTION(aclnnFlashAttentionScoreGradV2, kGrad, kOfDense, kPrefix, kStarts, kScalars,
                  kPseType, kGradients)
CANN_SIM_FUNCTION(aclnnFlashAttentionScoreGradV3, kExtendedGrad, kOfDense, kSink, kPrefix, kStarts,
                  kScalars, kPseType, kGradients, kOfSink)
CANN_SIM_FUNCTION(aclnnFlashAttentionScoreGradV4, kExtendedGrad, kOfDense, kSink, kQueryRope,
                  kKeyRope, kScales, not_computed("dScaleDyOptional", "dScaleOOptional"), kPrefix,
                  kLengths, kStarts, kScaleToLayout, kSoftmaxLayout, kPreciseAndMode, kPseType,
                  kSeed, kOutDtype, kOfQuery, kOfKey, kOfValue, kOfQueryRope, kOfKeyRope, kOfPse,
                  kOfSink)
CANN_SIM_FUNCTION(aclnnFlashAttentionUnpaddingScoreGrad, kGrad, kOfDense, kPrefix, kLengths,
                  kScalars, kGradients)
CANN_SIM_FUNCTION(aclnnFlashAttentionUnpaddingScoreGradV2, kGrad, kOfDense, kPrefix, kLengths,
                  kStarts, kScalars, kPseType, kGradients)
CANN_SIM_FUNCTION(aclnnFlashAttentionUnpaddingScoreGradV3, kExtendedGrad, kOfRoped, kPrefix,
                  kLengths, kStarts, kScalars, kPseType, kRopeGradients)
CANN_SIM_FUNCTION(aclnnFlashAttentionUnpaddingScoreGradV4, kGrad, kOfDense, kPrefix, kLengths,
                  kScalars, kGradients, kSoftmaxLayout)
CANN_SIM_FUNCTION(aclnnFlashAttentionUnpaddingScoreGradV5, kExtendedGrad, kOfRoped, kSink, kPrefix,
                  kLengths, kStarts, kScalars, kPseType, kSoftmaxLayout, kRopeGradients, kOfSink)
