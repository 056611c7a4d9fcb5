// SparseFlashAttention and its gradient. Prototypes: docs/specification/sparse_flash_attention.md.
#include "opapi.h"

using namespace cann_sim;

namespace {

// What both functions take.
const Arguments kTensors{input("query", "query", kHalf), input("key", "key", kHalf),
                         input("value", "value", kHalf),
                         input("sparseIndices", "sparse_indices", kInt32)};
const Arguments kOptions{
    optional_input("actualSeqLengthsQueryOptional", "actual_seq_lengths_query", kInt32),
    optional_input("actualSeqLengthsKvOptional", "actual_seq_lengths_key", kInt32),
    optional_input("queryRopeOptional", "query_rope", kHalf),
    optional_input("keyRopeOptional", "key_rope", kHalf),
    attribute("scaleValue", "scale_value"),
    attribute("sparseBlockSize", "sparse_block_size")};
const Arguments kMode{attribute("sparseMode", "sparse_mode"), attribute("preTokens", "pre_tokens"),
                      attribute("nextTokens", "next_tokens")};

// The statistics are (1, T, N).
at::Tensor written_attention(const Call& call, std::string_view name, const at::Tensor& output) {
  return rows_of_sequences(call, output, name == "attentionOut" ? 0 : 1, "layoutQueryOptional",
                           "actualSeqLengthsQueryOptional");
}

const Function sparse_flash_attention{
    .name = "aclnnSparseFlashAttention",
    .schema_name = "ascend::sparse_flash_attention",
    .workspace = 4096,
    .arguments =
        join({kTensors,
              {optional_input("blockTableOptional", "")},
              kOptions,
              {attribute("layoutQueryOptional", "layout"), attribute("layoutKvOptional")},
              kMode,
              {attribute("attentionMode"), attribute("returnSoftmaxLse"), output("attentionOut"),
               optional_output("softmaxMax"), optional_output("softmaxSum")}}),
    .device = {.written = written_attention}};

const Function sparse_flash_attention_grad{
    .name = "aclnnSparseFlashAttentionGrad",
    .schema_name = "ascend::sparse_flash_attention_grad",
    .workspace = 8192,
    .arguments = join(
        {kTensors,
         {input("dOut", "d_out", kHalf), input("out", "out", kHalf),
          input("softmaxMax", "softmax_max", kFloat), input("softmaxSum", "softmax_sum", kFloat)},
         kOptions,
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
