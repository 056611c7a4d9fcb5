// LightningIndexer and its gradient. Prototypes: docs/specification/lightning_indexer.md.
#include "opapi.h"

using namespace cann_sim;

namespace {

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

}  // namespace

extern "C" {

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

}  // extern "C"
