// The functions of DeepSeek Sparse Attention. Prototypes: spec, section 1.
#include "opapi.h"

using namespace cann_sim;

namespace {

using Tensor = const aclTensor*;
using IntArray = const aclIntArray*;

const std::vector<aclDataType> kHalf{ACL_FLOAT16, ACL_BF16};
const std::vector<aclDataType> kHalfOrFloat{ACL_FLOAT16, ACL_BF16, ACL_FLOAT};
const std::vector<aclDataType> kInt32{ACL_INT32};
const std::vector<aclDataType> kFloat{ACL_FLOAT};

const Function sparse_flash_attention{
    .name = "aclnnSparseFlashAttention",
    .schema_name = "ascend::sparse_flash_attention",
    .workspace = 4096,
    .arguments = {
        input("query", "query", kHalf),
        input("key", "key", kHalf),
        input("value", "value", kHalf),
        input("sparseIndices", "sparse_indices", kInt32),
        optional_input("blockTableOptional", ""),
        optional_input("actualSeqLengthsQueryOptional", "actual_seq_lengths_query", kInt32),
        optional_input("actualSeqLengthsKvOptional", "actual_seq_lengths_key", kInt32),
        optional_input("queryRopeOptional", "query_rope", kHalf),
        optional_input("keyRopeOptional", "key_rope", kHalf),
        attribute("scaleValue", "scale_value"),
        attribute("sparseBlockSize", "sparse_block_size"),
        attribute("layoutQueryOptional", "layout"),
        attribute("layoutKvOptional"),
        attribute("sparseMode", "sparse_mode"),
        attribute("preTokens", "pre_tokens"),
        attribute("nextTokens", "next_tokens"),
        attribute("attentionMode"),
        attribute("returnSoftmaxLse"),
        output("attentionOut"),
        optional_output("softmaxMax"),
        optional_output("softmaxSum")}};

const Function sparse_flash_attention_grad{
    .name = "aclnnSparseFlashAttentionGrad",
    .schema_name = "ascend::sparse_flash_attention_grad",
    .workspace = 8192,
    .arguments = {
        input("query", "query", kHalf),
        input("key", "key", kHalf),
        input("value", "value", kHalf),
        input("sparseIndices", "sparse_indices", kInt32),
        input("dOut", "d_out", kHalf),
        input("out", "out", kHalf),
        input("softmaxMax", "softmax_max", kFloat),
        input("softmaxSum", "softmax_sum", kFloat),
        optional_input("actualSeqLengthsQueryOptional", "actual_seq_lengths_query", kInt32),
        optional_input("actualSeqLengthsKvOptional", "actual_seq_lengths_key", kInt32),
        optional_input("queryRopeOptional", "query_rope", kHalf),
        optional_input("keyRopeOptional", "key_rope", kHalf),
        attribute("scaleValue", "scale_value"),
        attribute("sparseBlockSize", "sparse_block_size"),
        attribute("layoutOptional", "layout"),
        attribute("sparseMode", "sparse_mode"),
        attribute("preTokens", "pre_tokens"),
        attribute("nextTokens", "next_tokens"),
        attribute("deterministic", "deterministic"),
        output("dQueryOut"),
        output("dKeyOut"),
        output("dValueOut"),
        optional_output("dQueryRopeOutOptional"),
        optional_output("dKeyRopeOutOptional")}};

const Function lightning_indexer{
    .name = "aclnnLightningIndexer",
    .schema_name = "ascend::lightning_indexer",
    .workspace = 512,
    .arguments = {
        input("query", "query", kHalf), input("key", "key", kHalf),
        input("weights", "weights", kHalfOrFloat),
        optional_input("actualSeqLengthsQueryOptional", "actual_seq_lengths_query", kInt32),
        optional_input("actualSeqLengthsKeyOptional", "actual_seq_lengths_key", kInt32),
        optional_input("blockTableOptional", ""), attribute("layoutQueryOptional", "layout"),
        attribute("layoutKeyOptional"), attribute("sparseCount", "sparse_count"),
        attribute("sparseMode", "sparse_mode"), attribute("preTokens", "pre_tokens"),
        attribute("nextTokens", "next_tokens"), attribute("returnValues", "return_values"),
        output("sparseIndicesOut"), optional_output("sparseValuesOut")}};

const Function lightning_indexer_grad{
    .name = "aclnnLightningIndexerGrad",
    .schema_name = "ascend::lightning_indexer_grad",
    .arguments = {
        input("query", "query", kHalf), input("key", "key", kHalf),
        input("dy", "d_values", kHalfOrFloat), input("sparseIndices", "sparse_indices", kInt32),
        input("weights", "weights", kHalfOrFloat),
        optional_input("actualSeqQLenOptional", "actual_seq_lengths_query", kInt32),
        optional_input("actualSeqKvLenOptional", "actual_seq_lengths_key", kInt32),
        attribute("headNum"), attribute("inputLayout", "layout"),
        attribute("sparseMode", "sparse_mode"), attribute("preTokens", "pre_tokens"),
        attribute("nextTokens", "next_tokens"), attribute("deterministic", "deterministic"),
        output("dqOut"), output("dkOut"), output("dweightsOut")}};

const Function sparse_lightning_indexer_grad_kl_loss{
    .name = "aclnnSparseLightningIndexerGradKLLoss",
    .schema_name = "ascend::sparse_lightning_indexer_grad_kl_loss",
    .workspace = 1024,
    .arguments = {input("query", "query", kHalf),
                  input("key", "key", kHalf),
                  input("queryIndex", "query_index", kHalf),
                  input("keyIndex", "key_index", kHalf),
                  input("weights", "weights", kHalfOrFloat),
                  input("sparseIndices", "sparse_indices", kInt32),
                  input("softmaxMax", "softmax_max", kFloat),
                  input("softmaxSum", "softmax_sum", kFloat),
                  optional_input("queryRope", "query_rope", kHalf),
                  optional_input("keyRope", "key_rope", kHalf),
                  lengths("actualSeqLengthsQuery", "actual_seq_lengths_query"),
                  lengths("actualSeqLengthsKey", "actual_seq_lengths_key"),
                  attribute("scaleValue", "scale_value"),
                  attribute("layout", "layout"),
                  attribute("sparseMode", "sparse_mode"),
                  attribute("preTokens", "pre_tokens"),
                  attribute("nextTokens", "next_tokens"),
                  attribute("deterministic", "deterministic"),
                  output("dQueryIndex"),
                  output("dKeyIndex"),
                  output("dWeights"),
                  output("loss")}};

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

int aclnnLightningIndexerGetWorkspaceSize(Tensor query, Tensor key, Tensor weights,
                                          Tensor query_lengths, Tensor key_lengths,
                                          Tensor block_table, char* query_layout, char* key_layout,
                                          int64_t count, int64_t mode, int64_t pre_tokens,
                                          int64_t next_tokens, bool return_values, Tensor indices,
                                          Tensor values, uint64_t* workspace_size,
                                          aclOpExecutor** executor) {
  return prepare(lightning_indexer, workspace_size, executor, query, key, weights, query_lengths,
                 key_lengths, block_table, query_layout, key_layout, count, mode, pre_tokens,
                 next_tokens, return_values, indices, values);
}
int aclnnLightningIndexer(void* workspace, uint64_t size, aclOpExecutor* executor,
                          aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnLightningIndexerGradGetWorkspaceSize(Tensor query, Tensor key, Tensor dy, Tensor indices,
                                              Tensor weights, Tensor query_lengths,
                                              Tensor key_lengths, int64_t heads, char* layout,
                                              int64_t mode, int64_t pre_tokens, int64_t next_tokens,
                                              bool deterministic, Tensor dq, Tensor dk,
                                              Tensor dweights, uint64_t* workspace_size,
                                              aclOpExecutor** executor) {
  return prepare(lightning_indexer_grad, workspace_size, executor, query, key, dy, indices, weights,
                 query_lengths, key_lengths, heads, layout, mode, pre_tokens, next_tokens,
                 deterministic, dq, dk, dweights);
}
int aclnnLightningIndexerGrad(void* workspace, uint64_t size, aclOpExecutor* executor,
                              aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

int aclnnSparseLightningIndexerGradKLLossGetWorkspaceSize(
    Tensor query, Tensor key, Tensor query_index, Tensor key_index, Tensor weights, Tensor indices,
    Tensor max, Tensor sum, Tensor query_rope, Tensor key_rope, IntArray query_lengths,
    IntArray key_lengths, double scale, char* layout, int64_t mode, int64_t pre_tokens,
    int64_t next_tokens, bool deterministic, Tensor d_query_index, Tensor d_key_index,
    Tensor d_weights, Tensor loss, uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(sparse_lightning_indexer_grad_kl_loss, workspace_size, executor, query, key,
                 query_index, key_index, weights, indices, max, sum, query_rope, key_rope,
                 query_lengths, key_lengths, scale, layout, mode, pre_tokens, next_tokens,
                 deterministic, d_query_index, d_key_index, d_weights, loss);
}
int aclnnSparseLightningIndexerGradKLLoss(void* workspace, uint64_t size, aclOpExecutor* executor,
                                          aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

}  // extern "C"
