// SparseFlashAttention and its gradient. Prototypes: docs/specification/sparse_flash_attention.md.
#include <ATen/TensorOperators.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/maximum.h>

#include "opapi/ours/paged_keys.h"

using namespace cann_sim;

namespace {

// Arguments of both functions.
const Arguments kTensors{input("query", "query", kHalf), input("key", "key", kHalf),
                         input("value", "value", kHalf),
                         input("sparseIndices", "sparse_indices", kInt32)};
const Arguments kLengthsAndRopes{
    optional_input("actualSeqLengthsQueryOptional", "actual_seq_lengths_query", kInt32),
    optional_input("actualSeqLengthsKvOptional", "actual_seq_lengths_key", kInt32),
    optional_input("queryRopeOptional", "query_rope", kHalf),
    optional_input("keyRopeOptional", "key_rope", kHalf)};
const Arguments kScale{attribute("scaleValue", "scale_value"),
                       attribute("sparseBlockSize", "sparse_block_size")};
const Arguments kMode{attribute("sparseMode", "sparse_mode"), attribute("preTokens", "pre_tokens"),
                      attribute("nextTokens", "next_tokens")};

// The statistics are (1, T, N).
at::Tensor written_attention(const Call& call, std::string_view name, const at::Tensor& output) {
  return rows_of_sequences(call, output, name == "attentionOut" ? 0 : 1, "layoutQueryOptional",
                           "actualSeqLengthsQueryOptional");
}

const PagedKeys kKeys{
    .caches = {{"key", "key"}, {"value", "value"}, {"keyRopeOptional", "key_rope"}},
    .lengths = "actualSeqLengthsKvOptional",
    .query_layout = "layoutQueryOptional",
    .layout = "layoutKvOptional"};

torch::jit::Stack attention(const Call& call) {
  return call.results(kKeys.in_layout_of_query(call));
}

// A sink is a key of no value that every query of a head sees: it takes part in the softmax alone.
torch::jit::Stack attention_with_sinks(const Call& call) {
  const auto sinks = call.optional_tensor("sinksOptional");
  if (!sinks) {
    return attention(call);
  }
  auto arguments = kKeys.in_layout_of_query(call);
  arguments.try_emplace("query", call.tensor("query"));
  arguments.try_emplace("query_rope", call.optional_tensor("queryRopeOptional"));
  arguments.try_emplace("key", call.tensor("key"));
  arguments.try_emplace("value", call.tensor("value"));
  arguments.try_emplace("key_rope", call.optional_tensor("keyRopeOptional"));
  for (const auto* name : {"query", "query_rope", "key", "value", "key_rope"}) {
    auto& argument = arguments[name];
    if (argument.isTensor()) {
      argument = argument.toTensor().to(at::kFloat);
    }
  }
  const auto results = call.results(arguments);
  // (..., Nk, S, N / Nk)
  const auto max_of_keys = results[1].toTensor();
  const auto of_heads = sinks->to(at::kFloat).view({max_of_keys.size(-3), 1, max_of_keys.size(-1)});
  const auto max = at::maximum(max_of_keys, of_heads);
  const auto sum_of_keys = results[2].toTensor() * at::exp(max_of_keys - max);
  const auto sum = sum_of_keys + at::exp(of_heads - max);
  const auto share = (sum_of_keys / sum).transpose(-3, -2).flatten(-2).unsqueeze(-1);
  return {results[0].toTensor() * share, max, sum};
}

const Arguments kBlockTable{optional_input("blockTableOptional", "", kInt32)};
const Arguments kLayouts{attribute("layoutQueryOptional", "layout"), attribute("layoutKvOptional")};
const Arguments kOutputs{attribute("attentionMode"), attribute("returnSoftmaxLse"),
                         output("attentionOut"), optional_output("softmaxMax"),
                         optional_output("softmaxSum")};

const Function sparse_flash_attention{
    .name = "aclnnSparseFlashAttention",
    .schema_name = "ascend::sparse_flash_attention",
    .workspace = 4096,
    .arguments = join({kTensors, kBlockTable, kLengthsAndRopes, kScale, kLayouts, kMode, kOutputs}),
    .device = {.written = written_attention},
    .compute = attention};
// torch_npu calls it where there are sinks.
const Function sparse_flash_attention_v2{.name = "aclnnSparseFlashAttentionV2",
                                         .schema_name = "ascend::sparse_flash_attention",
                                         .workspace = 4096,
                                         .arguments = join({kTensors,
                                                            kBlockTable,
                                                            kLengthsAndRopes,
                                                            {optional_input("sinksOptional", "")},
                                                            kScale,
                                                            kLayouts,
                                                            kMode,
                                                            kOutputs}),
                                         .device = {.written = written_attention},
                                         .compute = attention_with_sinks};

const Function sparse_flash_attention_grad{
    .name = "aclnnSparseFlashAttentionGrad",
    .schema_name = "ascend::sparse_flash_attention_grad",
    .workspace = 8192,
    .arguments = join(
        {kTensors,
         {input("dOut", "d_out", kHalf), input("out", "out", kHalf),
          input("softmaxMax", "softmax_max", kFloat), input("softmaxSum", "softmax_sum", kFloat)},
         kLengthsAndRopes,
         kScale,
         {attribute("layoutOptional", "layout")},
         kMode,
         {attribute("deterministic", "deterministic"), output("dQueryOut"), output("dKeyOut"),
          output("dValueOut"), optional_output("dQueryRopeOutOptional"),
          optional_output("dKeyRopeOutOptional")}})};

}  // namespace

extern "C" {

int aclnnSparseFlashAttentionGetWorkspaceSize(
    Tensor query, Tensor key, Tensor value, Tensor indices, Tensor block_table,
    Tensor query_lengths, Tensor key_lengths, Tensor query_rope, Tensor key_rope, double scale,
    int64_t block_size, char* query_layout, char* key_layout, int64_t mode, int64_t pre_tokens,
    int64_t next_tokens, int64_t attention_mode, bool return_lse, Tensor out, Tensor max,
    Tensor sum, uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(sparse_flash_attention, workspace_size, executor, query, key, value, indices,
                 block_table, query_lengths, key_lengths, query_rope, key_rope, scale, block_size,
                 query_layout, key_layout, mode, pre_tokens, next_tokens, attention_mode,
                 return_lse, out, max, sum);
}
int aclnnSparseFlashAttention(void* workspace, uint64_t size, aclOpExecutor* executor,
                              aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnSparseFlashAttentionV2GetWorkspaceSize(
    Tensor query, Tensor key, Tensor value, Tensor indices, Tensor block_table,
    Tensor query_lengths, Tensor key_lengths, Tensor query_rope, Tensor key_rope, Tensor sinks,
    double scale, int64_t block_size, char* query_layout, char* key_layout, int64_t mode,
    int64_t pre_tokens, int64_t next_tokens, int64_t attention_mode, bool return_lse, Tensor out,
    Tensor max, Tensor sum, uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(sparse_flash_attention_v2, workspace_size, executor, query, key, value, indices,
                 block_table, query_lengths, key_lengths, query_rope, key_rope, sinks, scale,
                 block_size, query_layout, key_layout, mode, pre_tokens, next_tokens,
                 attention_mode, return_lse, out, max, sum);
}
CANN_SIM_SECOND_PHASE(aclnnSparseFlashAttentionV2)

int aclnnSparseFlashAttentionGradGetWorkspaceSize(
    Tensor query, Tensor key, Tensor value, Tensor indices, Tensor d_out, Tensor out, Tensor max,
    Tensor sum, Tensor query_lengths, Tensor key_lengths, Tensor query_rope, Tensor key_rope,
    double scale, int64_t block_size, char* layout, int64_t mode, int64_t pre_tokens,
    int64_t next_tokens, bool deterministic, Tensor d_query, Tensor d_key, Tensor d_value,
    Tensor d_query_rope, Tensor d_key_rope, uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(sparse_flash_attention_grad, workspace_size, executor, query, key, value, indices,
                 d_out, out, max, sum, query_lengths, key_lengths, query_rope, key_rope, scale,
                 block_size, layout, mode, pre_tokens, next_tokens, deterministic, d_query, d_key,
                 d_value, d_query_rope, d_key_rope);
}
int aclnnSparseFlashAttentionGrad(void* workspace, uint64_t size, aclOpExecutor* executor,
                                  aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

}  // extern "C"
