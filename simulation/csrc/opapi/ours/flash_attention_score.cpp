// FlashAttentionScore and its gradient. Prototypes: docs/specification/flash_attention_score.md.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/logical_or.h>

#include <algorithm>
#include <limits>
#include <span>

#include "ascendcl/runtime.h"
#include "opapi/ours/flash_attention_score.h"

namespace cann_sim {
namespace {

bool is_a2_or_a3() { return product() == Product::a2 || product() == Product::a3; }

}  // namespace

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

namespace {

using Ends = std::vector<int64_t>;

// The host code of A2 and A3 copies the lengths of a forward call into arrays of this size, without
// a check. It counts the tokens by what the arrays hold.
constexpr size_t kLengthsOnHost = 20000;

int64_t sum_of(const Ends& ends) {
  const auto counted = is_a2_or_a3() ? std::min(ends.size(), kLengthsOnHost) : ends.size();
  return ends.empty() ? 0 : *std::ranges::max_element(std::span(ends).first(counted));
}

}  // namespace

// A pack with tokens behind its sequences on both sides says so by a last element of 0.
void check_pack(const Call& call) {
  check_tokens(call);
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

// Behind the arrays of lengths lies the scale, which further key lengths overwrite.
OperatorArguments overwritten_arguments(const Call& call) {
  OperatorArguments arguments;
  if (is_a2_or_a3() && call.get<Ends>("actualSeqKvLenOptional").size() > kLengthsOnHost) {
    arguments["scale_value"] = 0.0;
  }
  return arguments;
}

torch::jit::Stack attention_of_pack(const Call& call) {
  return call.results(overwritten_arguments(call));
}

namespace {

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

}  // namespace

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

}  // namespace cann_sim

using namespace cann_sim;

namespace {

const Function score{
    .name = "aclnnFlashAttentionScoreV2",
    .schema_name = "ascend::flash_attention_score",
    .workspace = 2048,
    .arguments = join({kTensors, kTerms, kPrefix, kStarts, kScalars, kPseType, kOutputs}),
    .device = {.check = check_tokens, .faults = kMaskFaults}};
const Function var_len_score{
    .name = "aclnnFlashAttentionVarLenScoreV2",
    .schema_name = "ascend::flash_attention_score",
    .workspace = 2048,
    .arguments = join({kTensors, kTerms, kPrefix, kLengths, kStarts, kScalars, kPseType, kOutputs}),
    .device = {.check = check_pack, .faults = kMaskFaults},
    .compute = attention_of_pack};
const Function score_grad{.name = "aclnnFlashAttentionScoreGradV2",
                          .schema_name = "ascend::flash_attention_score_grad",
                          .workspace = 4096,
                          .arguments = join({kTensors, kSaved, kTerms, kStatistics, kPrefix,
                                             kStarts, kScalars, kPseType, kGradients}),
                          .device = {.check = check_tokens, .faults = kMaskFaults}};
const Function unpadding_score_grad{
    .name = "aclnnFlashAttentionUnpaddingScoreGradV2",
    .schema_name = "ascend::flash_attention_score_grad",
    .workspace = 4096,
    .arguments = join({kTensors, kSaved, kTerms, kStatistics, kPrefix, kLengths, kStarts, kScalars,
                       kPseType, kGradients}),
    .device = {.check = check_tokens, .faults = kMaskFaults}};

}  // namespace

extern "C" {

int aclnnFlashAttentionScoreV2GetWorkspaceSize(Tensor query, Tensor key, Tensor value, Tensor pse,
                                               Tensor drop, Tensor padding, Tensor mask,
                                               IntArray prefix, IntArray q_start, IntArray kv_start,
                                               double scale, double keep, int64_t pre, int64_t next,
                                               int64_t heads, char* layout, int64_t precise,
                                               int64_t mode, int64_t pse_type, Tensor max,
                                               Tensor sum, Tensor softmax, Tensor out,
                                               uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(score, workspace_size, executor, query, key, value, pse, drop, padding, mask,
                 prefix, q_start, kv_start, scale, keep, pre, next, heads, layout, precise, mode,
                 pse_type, max, sum, softmax, out);
}
int aclnnFlashAttentionScoreV2(void* workspace, uint64_t size, aclOpExecutor* executor,
                               aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnFlashAttentionVarLenScoreV2GetWorkspaceSize(
    Tensor query, Tensor key, Tensor value, Tensor pse, Tensor drop, Tensor padding, Tensor mask,
    IntArray prefix, IntArray query_lengths, IntArray key_lengths, IntArray q_start,
    IntArray kv_start, double scale, double keep, int64_t pre, int64_t next, int64_t heads,
    char* layout, int64_t precise, int64_t mode, int64_t pse_type, Tensor max, Tensor sum,
    Tensor softmax, Tensor out, uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(var_len_score, workspace_size, executor, query, key, value, pse, drop, padding,
                 mask, prefix, query_lengths, key_lengths, q_start, kv_start, scale, keep, pre,
                 next, heads, layout, precise, mode, pse_type, max, sum, softmax, out);
}
int aclnnFlashAttentionVarLenScoreV2(void* workspace, uint64_t size, aclOpExecutor* executor,
                                     aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnFlashAttentionScoreGradV2GetWorkspaceSize(
    Tensor query, Tensor key, Tensor value, Tensor dy, Tensor pse, Tensor drop, Tensor padding,
    Tensor mask, Tensor max, Tensor sum, Tensor softmax_in, Tensor attention_in, IntArray prefix,
    IntArray q_start, IntArray kv_start, double scale, double keep, int64_t pre, int64_t next,
    int64_t heads, char* layout, int64_t precise, int64_t mode, int64_t pse_type, Tensor dq,
    Tensor dk, Tensor dv, Tensor dpse, uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(score_grad, workspace_size, executor, query, key, value, dy, pse, drop, padding,
                 mask, max, sum, softmax_in, attention_in, prefix, q_start, kv_start, scale, keep,
                 pre, next, heads, layout, precise, mode, pse_type, dq, dk, dv, dpse);
}
int aclnnFlashAttentionScoreGradV2(void* workspace, uint64_t size, aclOpExecutor* executor,
                                   aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnFlashAttentionUnpaddingScoreGradV2GetWorkspaceSize(
    Tensor query, Tensor key, Tensor value, Tensor dy, Tensor pse, Tensor drop, Tensor padding,
    Tensor mask, Tensor max, Tensor sum, Tensor softmax_in, Tensor attention_in, IntArray prefix,
    IntArray query_lengths, IntArray key_lengths, IntArray q_start, IntArray kv_start, double scale,
    double keep, int64_t pre, int64_t next, int64_t heads, char* layout, int64_t precise,
    int64_t mode, int64_t pse_type, Tensor dq, Tensor dk, Tensor dv, Tensor dpse,
    uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(unpadding_score_grad, workspace_size, executor, query, key, value, dy, pse, drop,
                 padding, mask, max, sum, softmax_in, attention_in, prefix, query_lengths,
                 key_lengths, q_start, kv_start, scale, keep, pre, next, heads, layout, precise,
                 mode, pse_type, dq, dk, dv, dpse);
}
int aclnnFlashAttentionUnpaddingScoreGradV2(void* workspace, uint64_t size, aclOpExecutor* executor,
                                            aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

}  // extern "C"
