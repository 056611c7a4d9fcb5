// LightningIndexer and its gradient. Prototypes: docs/operators/lightning_indexer.md.
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "opapi/ours/paged_keys.h"
#include "opapi/ours/sparse_rows.h"

using namespace cann_sim;

namespace {

at::Tensor written_selection(const Call& call, std::string_view, const at::Tensor& output) {
  return rows_of_sequences(call, output, 0, "layoutQueryOptional", "actualSeqLengthsQueryOptional");
}

at::Tensor written_gradient(const Call& call, std::string_view name, const at::Tensor& output) {
  return rows_of_sequences(call, output, 0, "inputLayout",
                           name == "dkOut" ? "actualSeqKvLenOptional" : "actualSeqQLenOptional");
}

const KernelFault kManyIndices{
    Harm::bounds, [](const Call& call) -> std::string {
      constexpr int64_t kMost = 2048;
      const auto count = call.get<TensorView>("sparseIndices").sizes.back();
      return cann_version() >= kCann91 || count <= kMost
                 ? ""
                 : c10::str(count, " indices a row: the device has buffers for ", kMost);
    }};

using Lengths = std::vector<int64_t>;

// The lengths of queries and of keys. In layout BSND the kernel ignores what is given.
std::pair<Lengths, Lengths> lengths_of(const Call& call) {
  const bool packed = call.is_tnd("inputLayout");
  return {SequenceLengths{"query", packed ? "actualSeqQLenOptional" : "", packed}.of(call),
          SequenceLengths{"key", packed ? "actualSeqKvLenOptional" : "", packed}.of(call)};
}

// Without a causal mask the kernel reads every slot of a row, padding as well.
const KernelFault kMoreIndicesThanKeys{
    Harm::bounds, [](const Call& call) -> std::string {
      if (call.get<int64_t>("sparseMode") != 0) {
        return {};
      }
      const auto count = call.get<TensorView>("sparseIndices").sizes.back();
      const auto [queries, keys] = lengths_of(call);
      for (size_t b = 0; b < queries.size(); ++b) {
        if (queries[b] > 0 && keys.at(b) < count) {
          return c10::str("sequence ", b, " has ", keys[b], " keys for the ", count,
                          " slots of a row, which sparseMode 0 reads: the device reads and writes "
                          "out of bounds");
        }
      }
      return {};
    }};

std::string unequal_sequences(const Call& call) {
  const auto [queries, keys] = lengths_of(call);
  for (size_t b = 1; b < queries.size(); ++b) {
    if (queries[b] != queries[0] || keys.at(b) != keys[0]) {
      return c10::str("sequence ", b, " has ", queries[b], " queries and ", keys[b],
                      " keys, and sequence 0 has ", queries[0], " and ", keys[0],
                      ": the gradients of such a pack are wrong");
    }
  }
  return {};
}

// TND, sequences of unequal lengths: rows of d_query and d_weights are not written, and d_key
// counts some of them twice. Which ones depends on the number of cores: here it is the last
// sequence, always. An empty sequence divides by zero.
void spoil_unequal_sequences(const Call& call) {
  const auto [queries, keys] = lengths_of(call);
  TORCH_CHECK(!queries.empty(), "division by zero: no sequences");
  for (size_t b = 0; b < queries.size(); ++b) {
    TORCH_CHECK(queries[b] > 0 && keys.at(b) > 0, "division by zero: sequence ", b, " is empty");
  }
  if (unequal_sequences(call).empty()) {
    return;
  }
  const auto last = [&](std::string_view output, const Lengths& lengths) {
    const auto begin = std::accumulate(lengths.begin(), lengths.end() - 1, int64_t{0});
    return call.tensor(output).narrow(0, begin, lengths.back());
  };
  last("dqOut", queries).fill_(std::numeric_limits<double>::quiet_NaN());
  last("dweightsOut", queries).fill_(std::numeric_limits<double>::quiet_NaN());
  last("dkOut", keys).mul_(2);
}

const PagedKeys kKeys{.caches = {{"key", "key"}},
                      .lengths = "actualSeqLengthsKeyOptional",
                      .query_layout = "layoutQueryOptional",
                      .layout = "layoutKeyOptional"};

torch::jit::Stack selection(const Call& call) {
  return call.results(kKeys.in_layout_of_query(call));
}

}  // namespace

CANN_SIM_FUNCTION(
    aclnnLightningIndexer,
    {.schema_name = "ascend::lightning_indexer",
     .workspace = 512,
     .device = {.written = written_selection, .faults = {{Harm::bounds, pack_without_pairs}}},
     .compute = selection},
    input("query", "query", kHalf).or_status(kNoTensor), input("key", "key", kHalf),
    input("weights", "weights", kHalfOrFloat),
    optional_input("actualSeqLengthsQueryOptional", "actual_seq_lengths_query", kInt32),
    optional_input("actualSeqLengthsKeyOptional", "actual_seq_lengths_key", kInt32),
    optional_input("blockTableOptional", "", kInt32),
    attribute<char*>("layoutQueryOptional", "layout"), attribute<char*>("layoutKeyOptional"),
    attribute<int64_t>("sparseCount", "sparse_count"),
    attribute<int64_t>("sparseMode", "sparse_mode"), attribute<int64_t>("preTokens", "pre_tokens"),
    attribute<int64_t>("nextTokens", "next_tokens"),
    attribute<bool>("returnValues", "return_values"), output("sparseIndicesOut").in(kInt32),
    optional_output("sparseValuesOut").of_dtype_of("query"))

CANN_SIM_FUNCTION(aclnnLightningIndexerGrad,
                  {.schema_name = "ascend::lightning_indexer_grad",
                   .device = {.written = written_gradient,
                              .spoil = spoil_unequal_sequences,
                              .faults = {kManyIndices,
                                         kMoreIndicesThanKeys,
                                         {Harm::results, unequal_sequences}}}},
                  input("query", "query", kHalf), input("key", "key", kHalf),
                  input("dy", "d_values", kHalfOrFloat),
                  input("sparseIndices", "sparse_indices", kInt32),
                  input("weights", "weights", kHalfOrFloat),
                  optional_input("actualSeqQLenOptional", "actual_seq_lengths_query", kInt32),
                  optional_input("actualSeqKvLenOptional", "actual_seq_lengths_key", kInt32),
                  attribute<int64_t>("headNum"), attribute<char*>("inputLayout", "layout"),
                  attribute<int64_t>("sparseMode", "sparse_mode"),
                  attribute<int64_t>("preTokens", "pre_tokens"),
                  attribute<int64_t>("nextTokens", "next_tokens"),
                  attribute<bool>("deterministic", "deterministic"), output("dqOut").like("query"),
                  output("dkOut").like("key"), output("dweightsOut").like("weights"))
