#include "opapi/core/refusals.h"

#include <algorithm>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "ascendcl/runtime.h"

namespace cann_sim {
namespace {

constexpr int kNoTensor = -1;
constexpr int kNullPointer = 161001;
constexpr int kInvalid = 161002;
constexpr int kTiling = 561002;
constexpr int kInnerNullPointer = 561103;

// Why the host refuses a call; empty if it does not.
using Rule = std::function<std::string(const Call&)>;

Rule null(std::string_view argument) {
  return [=](const Call& call) {
    return call.find<TensorView>(argument) ? "" : c10::str(argument, " is nullptr");
  };
}

Rule dtype_in(std::string_view argument, Dtypes dtypes) {
  return [=](const Call& call) {
    const auto* view = call.find<TensorView>(argument);
    return !view || dtypes.allow(view->dtype)
               ? ""
               : c10::str(argument, ": dtype ", c10::str(scalar_type(view->dtype)),
                          " is not supported");
  };
}

// An output has the dtype of an input.
Rule dtype_of(std::string_view output, std::string_view input) {
  return [=](const Call& call) {
    const auto* model = call.find<TensorView>(input);
    return model ? dtype_in(output, {model->dtype})(call) : "";
  };
}

// An output has the dtype and the shape of an input.
Rule like(std::string_view output, std::string_view input) {
  return [=](const Call& call) {
    const auto* view = call.find<TensorView>(output);
    const auto* model = call.find<TensorView>(input);
    if (view && model && view->sizes != model->sizes) {
      return c10::str(output, ": shape [", c10::Join(", ", view->sizes), "] differs from that of ",
                      input);
    }
    return dtype_of(output, input)(call);
  };
}

// The same for a list of tensors of equal shape and dtype.
Rule like_first(std::string_view output, std::string_view list) {
  return [=](const Call& call) {
    const auto* view = call.find<TensorView>(output);
    const auto* models = call.find<std::vector<TensorView>>(list);
    return view && models && !models->empty() &&
                   (view->dtype != models->front().dtype || view->sizes != models->front().sizes)
               ? c10::str(output, " differs from the tensors of ", list)
               : "";
  };
}

std::string update_type(const Call& call) {
  const auto type = call.get<int64_t>("updateType");
  return type == 0 || type == 1 ? "" : c10::str("updateType ", type, " is not 0 or 1");
}

std::string update_lse(const Call& call) {
  return call.get<int64_t>("updateType") == 0 && call.find<TensorView>("lseOut")
             ? "lseOut is given, and updateType 0 has none"
             : "";
}

std::string missing_update_lse(const Call& call) {
  return call.get<int64_t>("updateType") == 1 ? null("lseOut")(call) : "";
}

std::string update_sizes(const Call& call) {
  const auto* parts = call.find<std::vector<TensorView>>("localOut");
  if (!parts || parts->empty()) {
    return {};
  }
  const size_t most = cann_version() >= kCann91 ? 128 : 16;
  if (parts->size() > most) {
    return c10::str("localOut has ", parts->size(), " tensors, more than ", most);
  }
  const auto& sizes = parts->front().sizes;
  return sizes.empty() || sizes.back() % 8 == 0
             ? ""
             : c10::str("localOut: the last size ", sizes.back(), " is no multiple of 8");
}

Rule statistics_missing(std::string_view argument) {
  return [=](const Call& call) {
    return call.get<bool>("returnSoftmaxLse") ? null(argument)(call) : "";
  };
}

std::string paged_statistics(const Call& call) {
  return call.get<bool>("returnSoftmaxLse") &&
                 call.get<std::string>("layoutKvOptional") == "PA_BSND"
             ? "when returnSoftmaxLse is true, layoutKv PA_BSND is not supported"
             : "";
}

// The host pads no value of 128 beside a key of 192, and then transposes it with the key's shape.
std::string transposed_value(const Call& call) {
  constexpr int64_t kMostRows = 256;
  const auto& layout = call.get<std::string>("inputLayout");
  const auto heads = call.get<int64_t>("headNum");
  const auto* query = call.find<TensorView>("query");
  const auto* key = call.find<TensorView>("key");
  const auto* value = call.find<TensorView>("value");
  const bool three_axes = layout == "SBH" || layout == "BSH";
  if (product() == Product::p950 || call.launch().deterministic || !query || !key || !value ||
      heads <= 0 || (!three_axes && layout != "BSND")) {
    return {};
  }
  const auto d = query->sizes.back() / (three_axes ? heads : 1);
  const auto key_heads = three_axes ? key->sizes.back() / std::max<int64_t>(d, 1) : key->sizes[2];
  const auto value_d = value->sizes.back() / (three_axes ? std::max<int64_t>(key_heads, 1) : 1);
  const auto rows = heads * (layout == "SBH" ? query->sizes[1] : 1);
  return d == 192 && value_d == 128 && rows >= kMostRows
             ? c10::str("value of 128 beside a key of 192 in layout ", layout, " with ", rows,
                        " heads cannot be reshaped")
             : "";
}

std::string sink_of_float_query(const Call& call) {
  const auto* sink = call.find<TensorView>("sinkOptional");
  return sink && call.get<TensorView>("query").dtype == ACL_FLOAT
             ? "sinkOptional: query of float is not supported"
             : "";
}

// Beside ropes, the host of A2 and A3 pads nothing, and combines them with a mask alone.
std::string ropes_of_a2(const Call& call) {
  const auto* query_rope = call.find<TensorView>("queryRopeOptional");
  const auto* key_rope = call.find<TensorView>("keyRopeOptional");
  if (product() == Product::p950 || (!query_rope && !key_rope)) {
    return {};
  }
  if (!query_rope || !key_rope) {
    return "one of the ropes is nullptr";
  }
  constexpr int64_t kPrefixCompressed = 6;
  constexpr int64_t kFirstPaddedTo128 = 196;
  const auto size = call.get<TensorView>("query").sizes.back();
  const auto unit = size < kFirstPaddedTo128 ? 16 : 128;
  const bool given = call.find<TensorView>("pseShiftOptional") ||
                     call.find<TensorView>("dropMaskOptional") || call.get<double>("keepProb") < 1;
  const bool fits = call.get<TensorView>("value").sizes.back() == size && size % unit == 0 &&
                    query_rope->sizes.back() <= size;
  return !given && fits && call.find<TensorView>("attenMaskOptional") &&
                 call.get<int64_t>("sparseMode") != kPrefixCompressed
             ? ""
             : "ropes are not supported with these arguments";
}

// Ascend 950 has kernels for one pair of sizes.
std::string ropes_of_950(const Call& call) {
  constexpr int64_t kSize = 128;
  constexpr int64_t kRopeSize = 64;
  const auto* rope = call.find<TensorView>("queryRopeOptional");
  const auto& layout = call.get<std::string>("inputLayout");
  const auto heads = layout == "BSH" || layout == "SBH" ? call.get<int64_t>("headNum") : 1;
  return !rope || (call.get<TensorView>("query").sizes.back() == heads * kSize &&
                   rope->sizes.back() == heads * kRopeSize)
             ? ""
             : "ropes: D is not 128 or Dr is not 64";
}

struct Refusal {
  std::vector<std::string_view> functions;  // without "aclnn"
  int status;
  std::vector<Rule> rules;
};

const std::vector<std::string_view> kScores{
    "FlashAttentionScore",         "FlashAttentionScoreV2",       "FlashAttentionScoreV3",
    "FlashAttentionVarLenScore",   "FlashAttentionVarLenScoreV2", "FlashAttentionVarLenScoreV3",
    "FlashAttentionVarLenScoreV4", "FlashAttentionVarLenScoreV5", "FlashAttentionScoreV4"};
const std::vector<std::string_view> kScoreGrads{"FlashAttentionScoreGrad",
                                                "FlashAttentionScoreGradV2",
                                                "FlashAttentionScoreGradV3",
                                                "FlashAttentionUnpaddingScoreGrad",
                                                "FlashAttentionUnpaddingScoreGradV2",
                                                "FlashAttentionUnpaddingScoreGradV3",
                                                "FlashAttentionUnpaddingScoreGradV4",
                                                "FlashAttentionUnpaddingScoreGradV5",
                                                "FlashAttentionScoreGradV4"};

const std::vector<Refusal>& refusals() {
  static const std::vector<Refusal> table{
      {kScores,
       kNullPointer,
       {dtype_of("attentionOutOut", "query"), dtype_in("softmaxMaxOut", kFloat),
        dtype_in("softmaxSumOut", kFloat)}},
      {kScoreGrads,
       kNullPointer,
       {like("dqOut", "query"), like("dkOut", "key"), like("dvOut", "value"),
        like("dpseOut", "pseShiftOptional")}},
      {{"FlashAttentionUnpaddingScoreGradV3", "FlashAttentionUnpaddingScoreGradV5",
        "FlashAttentionScoreGradV4"},
       kNullPointer,
       {like("dqRopeOut", "queryRopeOptional"), like("dkRopeOut", "keyRopeOptional")}},
      {{"FlashAttentionScoreGradV3", "FlashAttentionUnpaddingScoreGradV5",
        "FlashAttentionScoreGradV4"},
       kNullPointer,
       {like("dsinkOut", "sinkOptional")}},
      {{"FlashAttentionVarLenScoreV3", "FlashAttentionVarLenScoreV5",
        "FlashAttentionUnpaddingScoreGradV3", "FlashAttentionUnpaddingScoreGradV5"},
       kInvalid,
       {ropes_of_a2}},
      {{"FlashAttentionScoreV4", "FlashAttentionScoreGradV4"}, kInvalid, {ropes_of_950}},
      {{"FlashAttentionScoreGrad", "FlashAttentionScoreGradV2", "FlashAttentionScoreGradV3"},
       kNullPointer,
       {transposed_value}},
      {{"FlashAttentionScoreGradV3", "FlashAttentionUnpaddingScoreGradV5"},
       kInvalid,
       {sink_of_float_query}},
      {{"PromptFlashAttentionV3"},
       kInnerNullPointer,
       {dtype_in("attentionOut", {ACL_FLOAT16, ACL_BF16, ACL_INT8})}},
      {{"LightningIndexer"}, kNoTensor, {null("query")}},
      {{"LightningIndexer"},
       kInnerNullPointer,
       {dtype_in("sparseIndicesOut", kInt32), dtype_of("sparseValuesOut", "query")}},
      {{"LightningIndexerGrad"},
       kInnerNullPointer,
       {like("dqOut", "query"), like("dkOut", "key"), like("dweightsOut", "weights")}},
      {{"SparseFlashAttention"},
       kNoTensor,
       {statistics_missing("softmaxMax"), statistics_missing("softmaxSum")}},
      {{"SparseFlashAttention"},
       kTiling,
       {null("queryRopeOptional"), null("keyRopeOptional"), paged_statistics}},
      {{"SparseFlashAttention"},
       kInnerNullPointer,
       {dtype_of("attentionOut", "query"), dtype_in("softmaxMax", kFloat),
        dtype_in("softmaxSum", kFloat)}},
      {{"SparseFlashAttentionGrad"},
       kInnerNullPointer,
       {dtype_of("dQueryOut", "query"), dtype_of("dKeyOut", "key"),
        dtype_of("dValueOut", "value")}},
      {{"SparseLightningIndexerGradKLLoss"}, kTiling, {null("queryRope"), null("keyRope")}},
      {{"SparseLightningIndexerGradKLLoss"},
       kInnerNullPointer,
       {dtype_of("dQueryIndex", "queryIndex"), dtype_of("dKeyIndex", "keyIndex"),
        dtype_of("dWeights", "weights"), dtype_in("loss", kFloat)}},
      {{"ScatterPaKvCache"},
       kInnerNullPointer,
       {null("key"), null("keyCacheRef"), null("slotMapping"), null("value"),
        null("valueCacheRef")}},
      {{"AttentionUpdate"}, kInvalid, {update_type, update_lse, update_sizes}},
      {{"AttentionUpdate"}, kNullPointer, {missing_update_lse}},
      {{"AttentionUpdate"},
       kInnerNullPointer,
       {like_first("out", "localOut"), like_first("lseOut", "lse")}}};
  return table;
}

}  // namespace

std::optional<Refused> refused_by_host(const Function& function, const Call& call) {
  constexpr std::string_view kPrefix = "aclnn";
  const auto name = function.name.substr(kPrefix.size());
  for (const auto& refusal : refusals()) {
    if (std::ranges::find(refusal.functions, name) == refusal.functions.end()) {
      continue;
    }
    for (const auto& rule : refusal.rules) {
      if (auto text = rule(call); !text.empty()) {
        return Refused{refusal.status, std::move(text)};
      }
    }
  }
  return std::nullopt;
}

}  // namespace cann_sim
