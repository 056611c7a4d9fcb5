// PromptFlashAttention. Prototype: docs/specification/prompt_flash_attention.md. V3 is what
// torch_npu calls: the same, and innerPrecise.
#include "opapi.h"

using namespace cann_sim;

namespace {

const std::vector<aclDataType> kInput{ACL_FLOAT16, ACL_BF16, ACL_INT8};
const std::vector<aclDataType> kMask{ACL_BOOL, ACL_INT8, ACL_UINT8};
const std::vector<aclDataType> kDeqScale{ACL_UINT64, ACL_FLOAT};
const std::vector<aclDataType> kQuantScale{ACL_FLOAT, ACL_BF16};

std::vector<Argument> arguments(bool has_inner_precise) {
  std::vector<Argument> all{input("query", "query", kInput),
                            input("key", "key", kInput),
                            input("value", "value", kInput),
                            optional_input("pseShift", ""),
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
                            attribute("sparseMode", "sparse_mode")};
  if (has_inner_precise) {
    all.push_back(attribute("innerPrecise"));
  }
  all.push_back(output("attentionOut"));
  return all;
}

const Function v2{.name = "aclnnPromptFlashAttentionV2",
                  .schema_name = "ascend::prompt_flash_attention",
                  .workspace = 1024,
                  .arguments = arguments(/*has_inner_precise=*/false)};
const Function v3{.name = "aclnnPromptFlashAttentionV3",
                  .schema_name = "ascend::prompt_flash_attention",
                  .workspace = 1024,
                  .arguments = arguments(/*has_inner_precise=*/true)};

}  // namespace

extern "C" {

int aclnnPromptFlashAttentionV2GetWorkspaceSize(
    Tensor query, Tensor key, Tensor value, Tensor pse, Tensor mask, IntArray query_lengths,
    IntArray key_lengths, Tensor deq_scale1, Tensor quant_scale1, Tensor deq_scale2,
    Tensor quant_scale2, Tensor quant_offset2, int64_t heads, double scale, int64_t pre,
    int64_t next, char* layout, int64_t key_heads, int64_t mode, Tensor out,
    uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(v2, workspace_size, executor, query, key, value, pse, mask, query_lengths,
                 key_lengths, deq_scale1, quant_scale1, deq_scale2, quant_scale2, quant_offset2,
                 heads, scale, pre, next, layout, key_heads, mode, out);
}
int aclnnPromptFlashAttentionV2(void* workspace, uint64_t size, aclOpExecutor* executor,
                                aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

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
