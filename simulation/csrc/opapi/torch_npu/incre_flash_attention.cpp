// IncreFlashAttention: one new query per batch, over a key/value cache.
#include <utility>

#include "ascendcl/runtime.h"
#include "opapi/ours/infer_attention.h"

using namespace cann_sim;

namespace {

torch::jit::Stack compute(const Call& call) {
  auto arguments = arguments_of(call);
  // The only lengths are those of the keys.
  std::swap(arguments.query_lengths, arguments.key_lengths);
  arguments.block_table = call.optional_tensor("blocktable");
  arguments.sparse_mode = 1;
  return infer_attention(arguments);
}

void check(const Call& call) {
  TORCH_CHECK(product() != Product::p950, "a runtime error on this product");
  const auto& sizes = call.get<TensorView>("query").sizes;
  const auto queries = sizes.at(call.get<std::string>("inputLayout") == "BNSD" ? 2 : 1);
  TORCH_CHECK(queries == 1, "query has ", queries, " positions and not one");
}

}  // namespace

CANN_SIM_FUNCTION(aclnnIncreFlashAttentionV4,
                  {.workspace = 1024, .device = {.check = check}, .compute = compute},
                  input("query", "", kHalf), input<TensorList>("key", "", kHalf),
                  input<TensorList>("value", "", kHalf), optional_input("pseShift", "", kHalf),
                  optional_input("attenMask", "", kInferMask),
                  attribute<IntArray>("actualSeqLengths"),
                  not_computed("dequantScale1", "quantScale1", "dequantScale2", "quantScale2",
                               "quantOffset2", "antiquantScale", "antiquantOffset"),
                  optional_input("blocktable", "", kInt32),
                  optional_input("kvPaddingSize", "", {ACL_INT64}), attribute<int64_t>("numHeads"),
                  attribute<double>("scaleValue"), attribute<char*>("inputLayout"),
                  attribute<int64_t>("numKeyValueHeads"), attribute<int64_t>("blockSize"),
                  attribute<int64_t>("innerPrecise"), output("attentionOut"))
