// SparseLightningIndexerGradKLLoss. Prototypes:
// docs/operators/sparse_lightning_indexer_grad_kl_loss.md.
#include "opapi/core/opapi.h"

using namespace cann_sim;

namespace {

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

const Function kLoss{.schema_name = "ascend::sparse_lightning_indexer_grad_kl_loss",
                     .workspace = 1024,
                     .device = {.faults = {kOddCores}}};

constexpr auto kInputs = join(
    input("query", "query", kHalf), input("key", "key", kHalf),
    input("queryIndex", "query_index", kHalf), input("keyIndex", "key_index", kHalf),
    input("weights", "weights", kHalfOrFloat), input("sparseIndices", "sparse_indices", kInt32),
    input("softmaxMax", "softmax_max", kFloat), input("softmaxSum", "softmax_sum", kFloat),
    input("queryRope", "query_rope", kHalf).or_status(kTiling),
    input("keyRope", "key_rope", kHalf).or_status(kTiling),
    lengths("actualSeqLengthsQuery", "actual_seq_lengths_query"),
    lengths("actualSeqLengthsKey", "actual_seq_lengths_key"));
constexpr auto kOptions = join(
    attribute<double>("scaleValue", "scale_value"), attribute<char*>("layout", "layout"),
    attribute<int64_t>("sparseMode", "sparse_mode"), attribute<int64_t>("preTokens", "pre_tokens"),
    attribute<int64_t>("nextTokens", "next_tokens"),
    attribute<bool>("deterministic", "deterministic"),
    output("dQueryIndex").of_dtype_of("queryIndex"), output("dKeyIndex").of_dtype_of("keyIndex"),
    output("dWeights").of_dtype_of("weights"), output("loss").in(kFloat));

}  // namespace

CANN_SIM_FUNCTION(aclnnSparseLightningIndexerGradKLLoss, kLoss, kInputs, kOptions)
// torch_npu calls it where there are sinks.
CANN_SIM_FUNCTION(aclnnSparseLightningIndexerGradKLLossV2, kLoss, kInputs,
                  not_computed("sinksOptional"), kOptions)
