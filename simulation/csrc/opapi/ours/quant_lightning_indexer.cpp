// QuantLightningIndexer. Prototype: docs/operators/quant_lightning_indexer.md.
#include <utility>

#include "opapi/ours/paged_keys.h"
#include "opapi/ours/sparse_rows.h"

using namespace cann_sim;

namespace {

constexpr Dtypes kInt8{ACL_INT8};
constexpr Dtypes kFloat16{ACL_FLOAT16};

const PagedKeys kQuantisedKeys{.caches = {{"key", "key"}, {"keyDequantScale", "key_dequant_scale"}},
                               .lengths = "actualSeqLengthsKeyOptional",
                               .query_layout = "layoutQueryOptional",
                               .layout = "layoutKeyOptional"};

at::Tensor written_rows(const Call& call, std::string_view, const at::Tensor& output) {
  return rows_of_sequences(call, output, 0, "layoutQueryOptional", "actualSeqLengthsQueryOptional");
}

torch::jit::Stack quantised_selection(const Call& call) {
  return call.results(kQuantisedKeys.in_layout_of_query(call));
}

}  // namespace

// By its source the kernel writes nothing in a pack without pairs. Its sister, which has the same
// branch, wrote out of bounds when it was executed.
CANN_SIM_FUNCTION(
    aclnnQuantLightningIndexer,
    {.schema_name = "ascend::quant_lightning_indexer",
     .workspace = 512,
     .device = {.written = written_rows, .faults = {{Harm::bounds, pack_without_pairs}}},
     .compute = quantised_selection},
    input("query", "query", kInt8).or_status(kNoTensor),
    input("key", "key", kInt8).or_status(kNoTensor),
    input("weights", "weights", kFloat16).or_status(kNoTensor),
    input("queryDequantScale", "query_dequant_scale", kFloat16).or_status(kNoTensor),
    input("keyDequantScale", "key_dequant_scale", kFloat16).or_status(kNoTensor),
    optional_input("actualSeqLengthsQueryOptional", "actual_seq_lengths_query", kInt32),
    optional_input("actualSeqLengthsKeyOptional", "actual_seq_lengths_key", kInt32),
    optional_input("blockTableOptional", "", kInt32),
    attribute<int64_t>("queryQuantMode", "query_quant_mode"),
    attribute<int64_t>("keyQuantMode", "key_quant_mode"),
    attribute<char*>("layoutQueryOptional", "layout"), attribute<char*>("layoutKeyOptional"),
    attribute<int64_t>("sparseCount", "sparse_count"),
    attribute<int64_t>("sparseMode", "sparse_mode"), attribute<int64_t>("preTokens", "pre_tokens"),
    attribute<int64_t>("nextTokens", "next_tokens"), output("sparseIndicesOut").in(kInt32))
