// IncreFlashAttention: one new query per batch, over a key/value cache.
#include "ascendcl/runtime.h"
#include "opapi/torch_npu/infer_attention.h"

using namespace cann_sim;

namespace {

torch::jit::Stack compute(const Call& call) {
  const auto heads = call.get<int64_t>("numHeads");
  const auto key_heads = call.get<int64_t>("numKeyValueHeads");
  return infer_attention({.query = call.tensor("query"),
                          .key = only_tensor(call, "key"),
                          .value = only_tensor(call, "value"),
                          .layout = call.get<std::string>("inputLayout"),
                          .heads = heads,
                          .key_heads = key_heads ? key_heads : heads,
                          .scale = call.get<double>("scaleValue"),
                          .out_sizes = call.get<TensorView>("attentionOut").sizes,
                          .pse = call.optional_tensor("pseShift"),
                          .mask = call.optional_tensor("attenMask"),
                          .sparse_mode = 1,
                          .key_lengths = lengths_of(call, "actualSeqLengths"),
                          .block_table = call.optional_tensor("blocktable"),
                          .key_padding = call.optional_tensor("kvPaddingSize")});
}

void check(const Call& call) {
  TORCH_CHECK(product() != Product::p950, "a runtime error on this product");
  const auto& sizes = call.get<TensorView>("query").sizes;
  const auto queries = sizes.at(call.get<std::string>("inputLayout") == "BNSD" ? 2 : 1);
  TORCH_CHECK(queries == 1, "query has ", queries, " positions and not one");
}

const Function v4{.name = "aclnnIncreFlashAttentionV4",
                  .workspace = 1024,
                  .arguments = {input("query", "", kHalf),
                                input("key", "", kHalf),
                                input("value", "", kHalf),
                                optional_input("pseShift", "", kHalf),
                                optional_input("attenMask", "", kInferMask),
                                attribute("actualSeqLengths"),
                                not_computed("dequantScale1"),
                                not_computed("quantScale1"),
                                not_computed("dequantScale2"),
                                not_computed("quantScale2"),
                                not_computed("quantOffset2"),
                                not_computed("antiquantScale"),
                                not_computed("antiquantOffset"),
                                optional_input("blocktable", "", kInt32),
                                optional_input("kvPaddingSize", "", {ACL_INT64}),
                                attribute("numHeads"),
                                attribute("scaleValue"),
                                attribute("inputLayout"),
                                attribute("numKeyValueHeads"),
                                attribute("blockSize"),
                                attribute("innerPrecise"),
                                output("attentionOut")},
                  .device = {.check = check},
                  .compute = compute};

}  // namespace

extern "C" {

int aclnnIncreFlashAttentionV4GetWorkspaceSize(
    Tensor query, TensorList key, TensorList value, Tensor pse, Tensor mask, IntArray lengths,
    Tensor dequant_scale1, Tensor quant_scale1, Tensor dequant_scale2, Tensor quant_scale2,
    Tensor quant_offset2, Tensor antiquant_scale, Tensor antiquant_offset, Tensor block_table,
    Tensor key_padding, int64_t heads, double scale, char* layout, int64_t key_heads,
    int64_t block_size, int64_t precise, Tensor out, uint64_t* workspace_size,
    aclOpExecutor** executor) {
  return prepare(v4, workspace_size, executor, query, key, value, pse, mask, lengths,
                 dequant_scale1, quant_scale1, dequant_scale2, quant_scale2, quant_offset2,
                 antiquant_scale, antiquant_offset, block_table, key_padding, heads, scale, layout,
                 key_heads, block_size, precise, out);
}
CANN_SIM_SECOND_PHASE(aclnnIncreFlashAttentionV4)

}  // extern "C"
