// PromptFlashAttention V3. Prototype: docs/operators/prompt_flash_attention.md.
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "ascendcl/runtime.h"
#include "opapi/ours/infer_attention.h"

using namespace cann_sim;

namespace {

void check_product(const Call&) {
  TORCH_CHECK(product() != Product::p950, "a runtime error on this product");
}

// A row that the content of the mask masks whole is the mean of the values, unless innerPrecise
// asks for the correction of such rows. The softmax of float16 inputs in float16 is
// not simulated.
void average_masked_rows(const Call& call) {
  const auto& value = call.get<TensorView>("value");
  const auto& out = call.get<TensorView>("attentionOut");
  const auto* mask = call.find<TensorView>("attenMask");
  constexpr int64_t kFirstCompressedMode = 2;
  if (!mask || call.get<int64_t>("sparseMode") >= kFirstCompressedMode || value.dtype == ACL_INT8 ||
      out.dtype == ACL_INT8) {
    return;
  }
  // A row of a sum over ones is 0 where it has no keys.
  const auto ones = at::ones_like(value.tensor());
  const auto nothing = at::zeros_like(mask->tensor());
  const Value all_ones = in_place_of(value, ones);
  const Value no_mask = in_place_of(*mask, nothing);
  const auto masked = call.result_with({{"value", all_ones}});
  const auto unmasked = call.result_with({{"value", all_ones}, {"attenMask", no_mask}});
  const auto means = call.result_with({{"attenMask", no_mask}, {"scaleValue", 0.0}});
  auto target = out.tensor();
  target.copy_(at::where(masked.eq(0).logical_and(unmasked.ne(0)), means, target));
}

void correct_masked_rows(const Call& call) {
  constexpr int64_t kCorrection = 2;
  if ((call.get<int64_t>("innerPrecise") & kCorrection) == 0) {
    average_masked_rows(call);
  }
}

// The library's kernel has no pseShift.
torch::jit::Stack with_pse(const Call& call) {
  const auto pse = call.optional_tensor("pseShift");
  if (!pse) {
    return call.results();
  }
  TORCH_CHECK(call.get<TensorView>("query").dtype != ACL_INT8 &&
                  call.get<TensorView>("attentionOut").dtype != ACL_INT8,
              "the simulation computes pseShift without int8 only");
  return infer_attention(arguments_of(call));
}

constexpr Dtypes kInput{ACL_FLOAT16, ACL_BF16, ACL_INT8};
constexpr Dtypes kDeqScale{ACL_UINT64, ACL_FLOAT};
constexpr Dtypes kQuantScale{ACL_FLOAT, ACL_BF16, ACL_FLOAT16};

}  // namespace

CANN_SIM_FUNCTION(aclnnPromptFlashAttentionV3,
                  {.schema_name = "ascend::prompt_flash_attention",
                   .workspace = 1024,
                   .device = {.check = check_product, .spoil = correct_masked_rows},
                   .compute = with_pse},
                  input("query", "query", kInput), input("key", "key", kInput),
                  input("value", "value", kInput), optional_input("pseShift", "", kHalf),
                  optional_input("attenMask", "atten_mask", kInferMask),
                  attribute<IntArray>("actualSeqLengths", "actual_seq_lengths_query"),
                  attribute<IntArray>("actualSeqLengthsKv", "actual_seq_lengths_key"),
                  optional_input("deqScale1", "deq_scale1", kDeqScale),
                  optional_input("quantScale1", "quant_scale1", kFloat),
                  optional_input("deqScale2", "deq_scale2", kDeqScale),
                  optional_input("quantScale2", "quant_scale2", kQuantScale),
                  optional_input("quantOffset2", "quant_offset2", kQuantScale),
                  attribute<int64_t>("numHeads", "num_heads"),
                  attribute<double>("scaleValue", "scale_value"),
                  attribute<int64_t>("preTokens", "pre_tokens"),
                  attribute<int64_t>("nextTokens", "next_tokens"),
                  attribute<char*>("inputLayout", "layout"),
                  attribute<int64_t>("numKeyValueHeads", "num_key_value_heads"),
                  attribute<int64_t>("sparseMode", "sparse_mode"),
                  attribute<int64_t>("innerPrecise"), output("attentionOut").in(kInput))
