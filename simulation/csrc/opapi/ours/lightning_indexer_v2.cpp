// LightningIndexerV2, for compressed keys. Prototype: docs/operators/lightning_indexer.md.
#include <utility>

#include "opapi/ours/cu_seqlens.h"
#include "opapi/ours/paged_keys.h"

using namespace cann_sim;

namespace {

constexpr std::string_view kPaged = "PA_BBND";
const PagedKeys kKeys{.caches = {{"k", "key"}},
                      .lengths = "sequsedKOptional",
                      .query_layout = "layoutQ",
                      .layout = "layoutK",
                      .paged = kPaged};

bool in_pages(const Call& call) { return call.get<std::string>("layoutK") == kPaged; }

void check(const Call& call) {
  check_packed(call, "layoutQ", "cuSeqlensQOptional");
  if (in_pages(call)) {
    TORCH_CHECK(!call.find<TensorView>("cuSeqlensKOptional"), "cuSeqlensKOptional of paged keys");
  } else {
    check_packed(call, "layoutK", "cuSeqlensKOptional");
    // A2 and A3 document them for paged keys alone.
    TORCH_CHECK(!call.find<TensorView>("sequsedKOptional"), "sequsedKOptional of contiguous keys");
    TORCH_CHECK(!call.find<TensorView>("sequsedQOptional"), "sequsedQOptional of contiguous keys");
  }
}

torch::jit::Stack selection(const Call& call) {
  auto arguments = kKeys.in_layout_of_query(call);
  add_ends(call, "cuSeqlensQOptional", "actual_seq_lengths_query", arguments);
  add_ends(call, "cuSeqlensKOptional", "actual_seq_lengths_key", arguments);
  if (const auto used = call.optional_tensor("sequsedQOptional")) {
    arguments["actual_seq_lengths_query"] = *used;
  }
  if (in_pages(call) && !call.is_tnd("layoutQ")) {
    arguments["actual_seq_lengths_key"] = call.tensor("sequsedKOptional");
  }
  arguments["return_values"] = call.get<int64_t>("returnValue") != 0;
  add_residual(call, "cuSeqlensQOptional", arguments);
  return call.results(arguments);
}

// Rows behind the last sequence, and in layout BSND those behind the count of a batch, stay.
at::Tensor written(const Call& call, std::string_view, const at::Tensor& output) {
  return rows_of_sequences(call, output, 0, "layoutQ", "cuSeqlensQOptional");
}

}  // namespace

CANN_SIM_FUNCTION(aclnnLightningIndexerV2,
                  {.schema_name = "ascend::lightning_indexer",
                   .workspace = 512,
                   .device = {.check = check, .written = written},
                   .compute = selection},
                  input("q", "query", kHalf), input("k", "key", kHalf),
                  input("w", "weights", kFloat), optional_input("cuSeqlensQOptional", "", kInt32),
                  optional_input("cuSeqlensKOptional", "", kInt32),
                  optional_input("sequsedQOptional", "", kInt32),
                  optional_input("sequsedKOptional", "", kInt32),
                  optional_input("cmpResidualKOptional", "cmp_residual_key", kInt32),
                  optional_input("blockTableOptional", "", kInt32),
                  not_computed("outputIdxOffsetOptional", "metadataOptional"),
                  attribute<int64_t>("topk", "sparse_count"), attribute<int64_t>("maxSeqlenQ"),
                  attribute<char*>("layoutQ", "layout"), attribute<char*>("layoutK"),
                  attribute<int64_t>("maskMode", "sparse_mode"),
                  attribute<int64_t>("cmpRatio", "cmp_ratio"), attribute<int64_t>("returnValue"),
                  output("sparseIndices"), optional_output("sparseValues"))
