// SparseLightningIndexerGradKLLoss. Prototypes:
// docs/specification/sparse_lightning_indexer_grad_kl_loss.md.
#include "opapi/core/opapi.h"

using namespace cann_sim;

namespace {

const Arguments kInputs{input("query", "query", kHalf),
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
                        lengths("actualSeqLengthsKey", "actual_seq_lengths_key")};
const Arguments kOptions{attribute("scaleValue", "scale_value"),
                         attribute("layout", "layout"),
                         attribute("sparseMode", "sparse_mode"),
                         attribute("preTokens", "pre_tokens"),
                         attribute("nextTokens", "next_tokens"),
                         attribute("deterministic", "deterministic"),
                         output("dQueryIndex"),
                         output("dKeyIndex"),
                         output("dWeights"),
                         output("loss")};

// A flag that is set once for every two cores is waited for once for every two, counted from the
// other end.
const KernelFault kOddCores{Harm::hang, [](const Call& call) -> std::string {
                              const auto& sizes = call.get<TensorView>("query").sizes;
                              const auto tokens =
                                  sizes.at(0) * (call.is_tnd("layout") ? 1 : sizes.at(1));
                              const auto cores = cores_of_stream(call.launch().stream);
                              return call.launch().deterministic && cores % 2 == 1 && tokens > cores
                                         ? c10::str("deterministic, on a stream of ", cores,
                                                    " cores: the device waits for ever")
                                         : "";
                            }};

const Function sparse_lightning_indexer_grad_kl_loss{
    .name = "aclnnSparseLightningIndexerGradKLLoss",
    .schema_name = "ascend::sparse_lightning_indexer_grad_kl_loss",
    .workspace = 1024,
    .arguments = join({kInputs, kOptions}),
    .device = {.faults = {kOddCores}}};
// torch_npu calls it where there are sinks.
const Function sparse_lightning_indexer_grad_kl_loss_v2{
    .name = "aclnnSparseLightningIndexerGradKLLossV2",
    .schema_name = "ascend::sparse_lightning_indexer_grad_kl_loss",
    .workspace = 1024,
    .arguments = join({kInputs, {not_computed("sinksOptional")}, kOptions}),
    .device = {.faults = {kOddCores}}};

}  // namespace

extern "C" {

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

int aclnnSparseLightningIndexerGradKLLossV2GetWorkspaceSize(
    Tensor query, Tensor key, Tensor query_index, Tensor key_index, Tensor weights, Tensor indices,
    Tensor max, Tensor sum, Tensor query_rope, Tensor key_rope, IntArray query_lengths,
    IntArray key_lengths, Tensor sinks, double scale, char* layout, int64_t mode,
    int64_t pre_tokens, int64_t next_tokens, bool deterministic, Tensor d_query_index,
    Tensor d_key_index, Tensor d_weights, Tensor loss, uint64_t* workspace_size,
    aclOpExecutor** executor) {
  return prepare(sparse_lightning_indexer_grad_kl_loss_v2, workspace_size, executor, query, key,
                 query_index, key_index, weights, indices, max, sum, query_rope, key_rope,
                 query_lengths, key_lengths, sinks, scale, layout, mode, pre_tokens, next_tokens,
                 deterministic, d_query_index, d_key_index, d_weights, loss);
}
CANN_SIM_SECOND_PHASE(aclnnSparseLightningIndexerGradKLLossV2)

}  // extern "C"
