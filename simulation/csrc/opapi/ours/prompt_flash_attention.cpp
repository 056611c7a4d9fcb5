// PromptFlashAttention V3. Prototype: docs/specification/prompt_flash_attention.md.
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "ascendcl/runtime.h"
#include "opapi/torch_npu/infer_attention.h"

using namespace cann_sim;

namespace {

const std::vector<aclDataType> kInput{ACL_FLOAT16, ACL_BF16, ACL_INT8};
const std::vector<aclDataType> kMask{ACL_BOOL, ACL_INT8, ACL_UINT8};
const std::vector<aclDataType> kDeqScale{ACL_UINT64, ACL_FLOAT};
const std::vector<aclDataType> kQuantScale{ACL_FLOAT, ACL_BF16, ACL_FLOAT16};

const Arguments kArguments{input("query", "query", kInput),
                           input("key", "key", kInput),
                           input("value", "value", kInput),
                           optional_input("pseShift", "", kHalf),
                           optional_input("attenMask", "atten_mask", kMask),
                           attribute("actualSeqLengths", "actual_seq_lengths_query"),
                           attribute("actualSeqLengthsKv", "actual_seq_lengths_key"),
                           optional_input("deqScale1", "deq_scale1", kDeqScale),
                           optional_input("quantScale1", "quant_scale1", {ACL_FLOAT}),
                           optional_input("deqScale2", "deq_scale2", kDeqScale),
                           optional_input("quantScale2", "quant_scale2", kQuantScale),
                           optional_input("quantOffset2", "quant_offset2", kQuantScale),
                           attribute("numHeads", "num_heads"),
                           attribute("scaleValue", "scale_value"),
                           attribute("preTokens", "pre_tokens"),
                           attribute("nextTokens", "next_tokens"),
                           attribute("inputLayout", "layout"),
                           attribute("numKeyValueHeads", "num_key_value_heads"),
                           attribute("sparseMode", "sparse_mode"),
                           attribute("innerPrecise"),
                           output("attentionOut")};

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
  const auto heads = call.get<int64_t>("numHeads");
  const auto key_heads = call.get<int64_t>("numKeyValueHeads");
  return infer_attention({.query = call.tensor("query"),
                          .key = call.tensor("key"),
                          .value = call.tensor("value"),
                          .layout = call.get<std::string>("inputLayout"),
                          .heads = heads,
                          .key_heads = key_heads ? key_heads : heads,
                          .scale = call.get<double>("scaleValue"),
                          .out_sizes = call.get<TensorView>("attentionOut").sizes,
                          .pse = pse,
                          .mask = call.optional_tensor("attenMask"),
                          .sparse_mode = call.get<int64_t>("sparseMode"),
                          .pre_tokens = call.get<int64_t>("preTokens"),
                          .next_tokens = call.get<int64_t>("nextTokens"),
                          .query_lengths = lengths_of(call, "actualSeqLengths"),
                          .key_lengths = lengths_of(call, "actualSeqLengthsKv")});
}

const Function v3{.name = "aclnnPromptFlashAttentionV3",
                  .schema_name = "ascend::prompt_flash_attention",
                  .workspace = 1024,
                  .arguments = kArguments,
                  .device = {.check = check_product, .spoil = correct_masked_rows},
                  .compute = with_pse};

}  // namespace

extern "C" {

int aclnnPromptFlashAttentionV3GetWorkspaceSize(
    Tensor query, Tensor key, Tensor value, Tensor pse, Tensor mask, IntArray query_lengths,
    IntArray key_lengths, Tensor deq_scale1, Tensor quant_scale1, Tensor deq_scale2,
    Tensor quant_scale2, Tensor quant_offset2, int64_t heads, double scale, int64_t pre,
    int64_t next, char* layout, int64_t key_heads, int64_t mode, int64_t inner_precise, Tensor out,
    uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(v3, workspace_size, executor, query, key, value, pse, mask, query_lengths,
                 key_lengths, deq_scale1, quant_scale1, deq_scale2, quant_scale2, quant_offset2,
                 heads, scale, pre, next, layout, key_heads, mode, inner_precise, out);
}
int aclnnPromptFlashAttentionV3(void* workspace, uint64_t size, aclOpExecutor* executor,
                                aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

}  // extern "C"
