// LightningIndexer and its gradient. Prototypes: docs/specification/lightning_indexer.md.
#include <limits>
#include <set>
#include <utility>

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

const KernelFault kFaultOfSelection{
    Harm::bounds, [](const Call& call) -> std::string {
      const auto rows = call.get<TensorView>("query").sizes.at(0);
      const bool packed = call.is_tnd("layoutQueryOptional");
      if (!packed || rows == 0) {
        return {};
      }
      const auto queries =
          SequenceLengths{"query", "actualSeqLengthsQueryOptional", packed}.of(call);
      const bool in_pages = call.get<std::string>("layoutKeyOptional") == "PA_BSND";
      const auto keys =
          SequenceLengths{"key", "actualSeqLengthsKeyOptional", packed, in_pages}.of(call);
      for (size_t b = 0; b < queries.size(); ++b) {
        if (queries[b] > 0 && keys.at(b) > 0) {
          return {};
        }
      }
      return queries.size() < 2 ? ""
                                : c10::str("no sequence has queries and keys: the device writes ",
                                           queries.size() * rows, " rows into outputs of ", rows);
    }};

const KernelFault kManyIndices{
    Harm::bounds, [](const Call& call) -> std::string {
      constexpr int64_t kMost = 2048;
      const auto count = call.get<TensorView>("sparseIndices").sizes.back();
      return cann_version() >= kCann91 || count <= kMost
                 ? ""
                 : c10::str(count, " indices a row: the device has buffers for ", kMost);
    }};

// Without a causal mask the kernel reads every slot of a row, padding as well.
const KernelFault kMoreIndicesThanKeys{
    Harm::bounds, [](const Call& call) -> std::string {
      if (call.get<int64_t>("sparseMode") != 0) {
        return {};
      }
      const bool packed = call.is_tnd("inputLayout");
      const auto count = call.get<TensorView>("sparseIndices").sizes.back();
      // In layout BSND the kernel ignores lengths.
      const auto queries =
          SequenceLengths{"query", packed ? "actualSeqQLenOptional" : "", packed}.of(call);
      const auto keys =
          SequenceLengths{"key", packed ? "actualSeqKvLenOptional" : "", packed}.of(call);
      for (size_t b = 0; b < queries.size(); ++b) {
        if (queries[b] > 0 && keys.at(b) < count) {
          return c10::str("sequence ", b, " has ", keys[b], " keys for the ", count,
                          " slots of a row, which sparseMode 0 reads: the device reads and writes "
                          "out of bounds");
        }
      }
      return {};
    }};

const KernelFault kFaultOfGradient{
    Harm::results, [](const Call& call) -> std::string {
      if (!call.is_tnd("inputLayout")) {
        return {};
      }
      const auto queries = SequenceLengths{"query", "actualSeqQLenOptional", true}.of(call);
      const auto keys = SequenceLengths{"key", "actualSeqKvLenOptional", true}.of(call);
      for (size_t b = 1; b < queries.size(); ++b) {
        if (queries[b] != queries[0] || keys.at(b) != keys[0]) {
          return c10::str("sequence ", b, " has ", queries[b], " queries and ", keys[b],
                          " keys, and sequence 0 has ", queries[0], " and ", keys[0],
                          ": the gradients of such a pack are wrong");
        }
      }
      return {};
    }};

// TND, sequences of unequal lengths: rows of d_query and d_weights are not written, and d_key
// counts some of them twice. Which ones depends on the number of cores: here it is the last
// sequence, always. An empty sequence divides by zero.
void spoil_unequal_sequences(const Call& call) {
  if (!call.is_tnd("inputLayout")) {
    TORCH_CHECK(call.get<TensorView>("query").tensor().numel() > 0 &&
                    call.get<TensorView>("key").tensor().numel() > 0,
                "division by zero: no tokens");
    return;
  }
  const auto query_ends = call.elements("actualSeqQLenOptional");
  const auto key_ends = call.elements("actualSeqKvLenOptional");
  std::set<std::pair<int64_t, int64_t>> lengths;
  int64_t query_begin = 0;
  int64_t key_begin = 0;
  int64_t queries = 0;
  int64_t keys = 0;
  for (size_t b = 0; b < query_ends.size(); ++b) {
    query_begin += queries;
    key_begin += keys;
    queries = query_ends[b] - query_begin;
    keys = key_ends[b] - key_begin;
    TORCH_CHECK(queries > 0 && keys > 0, "division by zero: sequence ", b, " is empty");
    lengths.emplace(queries, keys);
  }
  TORCH_CHECK(!lengths.empty(), "division by zero: no sequences");
  if (lengths.size() > 1) {
    for (const auto* name : {"dqOut", "dweightsOut"}) {
      call.get<TensorView>(name)
          .tensor()
          .narrow(0, query_begin, queries)
          .fill_(std::numeric_limits<double>::quiet_NaN());
    }
    call.get<TensorView>("dkOut").tensor().narrow(0, key_begin, keys).mul_(2);
  }
}

const PagedKeys kKeys{.caches = {{"key", "key"}},
                      .lengths = "actualSeqLengthsKeyOptional",
                      .query_layout = "layoutQueryOptional",
                      .layout = "layoutKeyOptional"};

torch::jit::Stack selection(const Call& call) {
  return call.results(kKeys.in_layout_of_query(call));
}

const Function lightning_indexer{
    .name = "aclnnLightningIndexer",
    .schema_name = "ascend::lightning_indexer",
    .workspace = 512,
    .arguments = {input("query", "query", kHalf), input("key", "key", kHalf),
                  input("weights", "weights", kHalfOrFloat),
                  optional_input("actualSeqLengthsQueryOptional", "actual_seq_lengths_query",
                                 kInt32),
                  optional_input("actualSeqLengthsKeyOptional", "actual_seq_lengths_key", kInt32),
                  optional_input("blockTableOptional", "", kInt32),
                  attribute("layoutQueryOptional", "layout"), attribute("layoutKeyOptional"),
                  attribute("sparseCount", "sparse_count"), attribute("sparseMode", "sparse_mode"),
                  attribute("preTokens", "pre_tokens"), attribute("nextTokens", "next_tokens"),
                  attribute("returnValues", "return_values"), output("sparseIndicesOut"),
                  optional_output("sparseValuesOut")},
    .device = {.written = written_selection, .faults = {kFaultOfSelection}},
    .compute = selection};

const Function lightning_indexer_grad{
    .name = "aclnnLightningIndexerGrad",
    .schema_name = "ascend::lightning_indexer_grad",
    .arguments = {input("query", "query", kHalf), input("key", "key", kHalf),
                  input("dy", "d_values", kHalfOrFloat),
                  input("sparseIndices", "sparse_indices", kInt32),
                  input("weights", "weights", kHalfOrFloat),
                  optional_input("actualSeqQLenOptional", "actual_seq_lengths_query", kInt32),
                  optional_input("actualSeqKvLenOptional", "actual_seq_lengths_key", kInt32),
                  attribute("headNum"), attribute("inputLayout", "layout"),
                  attribute("sparseMode", "sparse_mode"), attribute("preTokens", "pre_tokens"),
                  attribute("nextTokens", "next_tokens"),
                  attribute("deterministic", "deterministic"), output("dqOut"), output("dkOut"),
                  output("dweightsOut")},
    .device = {.written = written_gradient,
               .spoil = spoil_unequal_sequences,
               .faults = {kManyIndices, kMoreIndicesThanKeys, kFaultOfGradient}}};

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
