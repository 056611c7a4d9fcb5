// SparseFlashMla, its metadata and its gradient. Prototypes:
// docs/operators/sparse_flash_mla.md.
//
// The metadata of a call says which core computes which rows. Here it holds the scalars that it was
// made for and a checksum of the lengths: a call with others would skip rows.
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "opapi/ours/cu_seqlens.h"
#include "opapi/ours/sparse_rows.h"

using namespace cann_sim;

namespace {

constexpr int64_t kMetadataSize = 1024;

// With the names that the operator and its metadata share.
const std::vector<std::string_view> kLengths{
    "cuSeqlensQOptional",   "cuSeqlensOriKvOptional", "cuSeqlensCmpKvOptional", "sequsedQOptional",
    "sequsedOriKvOptional", "sequsedCmpKvOptional",   "cmpResidualKvOptional"};
const std::vector<std::string_view> kScalars{"cmpRatio", "oriMaskMode", "cmpMaskMode", "oriWinLeft",
                                             "oriWinRight"};

template <typename Values>
int64_t checksum(const Values& values) {
  int64_t sum = 1;
  for (const auto x : values) {
    sum = (sum * 31 + x) % 1000003;
  }
  return sum;
}

// Returns what both calls must have in common.
std::vector<int64_t> facts_of(const Call& call) {
  std::vector<int64_t> facts;
  for (const auto name : kLengths) {
    facts.push_back(call.find<TensorView>(name) ? checksum(call.elements(name)) : -1);
  }
  for (const auto name : kScalars) {
    facts.push_back(call.get<int64_t>(name));
  }
  for (const auto* name : {"layoutQOptional", "layoutKvOptional"}) {
    facts.push_back(checksum(call.get<std::string>(name)));
  }
  return facts;
}

torch::jit::Stack metadata_of(const Call& call) {
  auto facts = facts_of(call);
  for (const auto* name : {"numHeadsQ", "numHeadsKv", "headDim", "batchSize", "maxSeqlenQ",
                           "maxSeqlenOriKv", "maxSeqlenCmpKv", "oriTopk", "cmpTopk"}) {
    facts.push_back(call.get<int64_t>(name));
  }
  facts.push_back(call.get<bool>("hasOriKv"));
  facts.push_back(call.get<bool>("hasCmpKv"));
  const auto metadata = at::zeros({kMetadataSize}, at::kInt);
  metadata.narrow(0, 0, static_cast<int64_t>(facts.size())).copy_(at::tensor(facts));
  return {metadata};
}

// The same of the operator's arguments.
std::vector<int64_t> expected_facts(const Call& call) {
  auto facts = facts_of(call);
  const bool packed = call.is_tnd("layoutQOptional");
  const auto& query = call.get<TensorView>("q").sizes;
  const auto* indices = call.find<TensorView>("cmpSparseIndicesOptional");
  const auto* cmp = call.find<TensorView>("cmpKvOptional");
  const auto longest = [&](std::string_view keys, std::string_view table) -> int64_t {
    const auto* view = call.find<TensorView>(keys);
    if (!view) {
      return 0;
    }
    const auto* blocks = call.find<TensorView>(table);
    return blocks ? blocks->sizes[1] * view->sizes[1] : packed ? 0 : view->sizes[1];
  };
  facts.insert(facts.end(),
               {query[query.size() - 2], 1, query.back(), packed ? 0 : query[0],
                packed ? 0 : query[1], longest("oriKvOptional", "oriBlockTableOptional"),
                longest("cmpKvOptional", "cmpBlockTableOptional"), 0,
                indices ? indices->sizes.back() : 0, 1, cmp != nullptr});
  return facts;
}

void check_metadata(const Call& call) {
  const auto facts = expected_facts(call);
  const auto given = call.elements("metadataOptional");
  for (size_t i = 0; i < facts.size(); ++i) {
    TORCH_CHECK(given.at(i) == facts[i], "metadataOptional was made for another call: word ", i,
                " is ", given.at(i), ", and the call's is ", facts[i]);
  }
}

// CANN compares them with dense strides, also where a size is 1.
void check_strides(const Call& call) {
  for (const auto* name : {"oriKvOptional", "cmpKvOptional"}) {
    const auto* view = call.find<TensorView>(name);
    if (!view) {
      continue;
    }
    int64_t stride = 1;
    for (size_t axis = view->sizes.size(); axis-- > 0;) {
      TORCH_CHECK(view->strides[axis] == stride, name, ": stride ", view->strides[axis],
                  " of axis ", axis, " is not dense");
      stride *= view->sizes[axis];
    }
  }
}

void check_operator(const Call& call) {
  check_strides(call);
  const auto* cmp = call.find<TensorView>("cmpKvOptional");
  TORCH_CHECK(!cmp || call.find<TensorView>("cmpResidualKvOptional"),
              "cmpResidualKvOptional is nullptr beside compressed keys");
}

void check_forward(const Call& call) {
  check_operator(call);
  TORCH_CHECK(call.find<TensorView>("metadataOptional"), "metadataOptional is nullptr");
}

void check_gradient(const Call& call) {
  check_operator(call);
  TORCH_CHECK(!call.launch().deterministic, "the deterministic mode is not supported");
  TORCH_CHECK(!call.find<TensorView>("metadataOptional"), "metadataOptional is not nullptr");
}

// Lengths as the operator takes them: without the leading 0.
OperatorArguments lengths_of(const Call& call) {
  OperatorArguments arguments;
  const auto set = [&](const char* schema, const char* cumulative, const char* counts) {
    add_ends(call, cumulative, schema, arguments);
    if (const auto used = call.optional_tensor(counts)) {
      arguments.try_emplace(schema, *used);
    }
  };
  set("actual_seq_lengths_query", "cuSeqlensQOptional", "sequsedQOptional");
  set("actual_seq_lengths_ori_kv", "cuSeqlensOriKvOptional", "sequsedOriKvOptional");
  set("actual_seq_lengths_cmp_kv", "cuSeqlensCmpKvOptional", "sequsedCmpKvOptional");
  return arguments;
}

torch::jit::Stack attention(const Call& call) {
  check_metadata(call);
  auto arguments = lengths_of(call);
  if (call.get<std::string>("layoutKvOptional") == "PA_BBND") {
    arguments["layout_kv"] = "PA_BSND";
  }
  return call.results(arguments);
}

// The device walks the cumulative lengths for every row of the shape.
std::string rows_behind_sequences(const Call& call) {
  if (!call.is_tnd("layoutQOptional")) {
    return {};
  }
  const auto rows = call.get<TensorView>("query").sizes[0];
  const auto ends = call.elements("cuSeqlensQOptional");
  return ends.back() == rows ? ""
                             : c10::str("cuSeqlensQOptional ends at ", ends.back(), " of ", rows,
                                        " rows: the device reads behind the lengths");
}

// A query, and the compressed keys that its position lets it see.
struct MlaRow {
  int64_t number;  // among all rows
  bool before_keys;
  int64_t visible;
};

// Lengths without the leading 0, which reads as one more sequence.
std::vector<int64_t> lengths_of_sequences(const Call& call, std::string_view tokens,
                                          std::string_view cumulative, std::string_view counts) {
  const bool packed = call.is_tnd("layoutQOptional");
  auto lengths = SequenceLengths{tokens, packed ? cumulative : counts, packed}.of(call);
  if (packed) {
    lengths.erase(lengths.begin());
  }
  return lengths;
}

// Returns the text of `fault` for the first row that has one. Paged keys have none here.
std::string find_in_queries(const Call& call, std::string_view query,
                            const std::function<std::string(const MlaRow&)>& fault) {
  const auto* residual = call.find<TensorView>("cmpResidualKvOptional");
  if (!call.find<TensorView>("cmpKvOptional") || !residual ||
      call.get<std::string>("layoutKvOptional") == "PA_BBND") {
    return {};
  }
  const auto queries = lengths_of_sequences(call, query, "cuSeqlensQOptional", "sequsedQOptional");
  const auto keys =
      lengths_of_sequences(call, "oriKvOptional", "cuSeqlensOriKvOptional", "sequsedOriKvOptional");
  const auto compressed =
      lengths_of_sequences(call, "cmpKvOptional", "cuSeqlensCmpKvOptional", "sequsedCmpKvOptional");
  const auto residuals = call.elements("cmpResidualKvOptional");
  const auto ratio = call.get<int64_t>("cmpRatio");
  int64_t begin = 0;
  for (size_t b = 0; b < queries.size(); ++b) {
    const auto tokens = compressed.at(b) * ratio + residuals.at(b);
    for (int64_t i = 0; i < queries[b]; ++i) {
      const auto visible = (tokens - queries[b] + i + 1) / ratio;
      const MlaRow row{begin + i, keys.at(b) - queries[b] + i < 0,
                       std::clamp<int64_t>(visible, 0, compressed[b])};
      if (const auto text = fault(row); !text.empty()) {
        return text;
      }
    }
    begin += call.is_tnd("layoutQOptional") ? queries[b] : call.get<TensorView>(query).sizes[1];
  }
  return {};
}

// A row has at least as many indices as it reads: min(K, n).
std::string few_indices(const Call& call, std::string_view query, std::string_view harm) {
  const auto* view = call.find<TensorView>("cmpSparseIndicesOptional");
  if (!view) {
    return {};
  }
  const auto indices = call.elements("cmpSparseIndicesOptional");
  const auto count = view->sizes.back();
  return find_in_queries(call, query, [&](const MlaRow& row) -> std::string {
    const auto read = std::min(count, row.before_keys ? 0 : row.visible);
    const auto first = indices.begin() + row.number * count;
    return std::find(first, first + read, -1) == first + read
               ? ""
               : c10::str("row ", row.number, " has fewer than ", read, " indices: ", harm);
  });
}

const KernelFault kStaleKeys{Harm::results, [](const Call& call) {
                               return few_indices(call, "q", "the softmax has stale keys");
                             }};
const KernelFault kRowMinusOne{Harm::bounds, [](const Call& call) {
                                 return few_indices(call, "query", "the device reads row -1");
                               }};
const KernelFault kRowsBeforeKeys{
    Harm::results, [](const Call& call) {
      return find_in_queries(call, "query", [](const MlaRow& row) -> std::string {
        return row.before_keys && row.visible > 0
                   ? c10::str("row ", row.number,
                              " is before all original keys and has gradients of compressed ones")
                   : "";
      });
    }};
const KernelFault kFirstResidual{
    Harm::results, [](const Call& call) -> std::string {
      if (call.is_tnd("layoutQOptional") || !call.find<TensorView>("cmpResidualKvOptional")) {
        return {};
      }
      const auto residuals = call.elements("cmpResidualKvOptional");
      return std::ranges::all_of(residuals, [&](auto x) { return x == residuals[0]; })
                 ? ""
                 : "the residual of the first batch counts for all of them";
    }};

torch::jit::Stack gradients(const Call& call) { return call.results(lengths_of(call)); }

at::Tensor written_attention(const Call& call, std::string_view name, const at::Tensor& output) {
  return rows_of_sequences(call, output, name == "attnOutOut" ? 0 : 1, "layoutQOptional",
                           "cuSeqlensQOptional");
}

constexpr auto kLengthArguments =
    join(optional_input("cuSeqlensQOptional", "", kInt32),
         optional_input("cuSeqlensOriKvOptional", "", kInt32),
         optional_input("cuSeqlensCmpKvOptional", "", kInt32),
         optional_input("sequsedQOptional", "", kInt32),
         optional_input("sequsedOriKvOptional", "", kInt32),
         optional_input("sequsedCmpKvOptional", "", kInt32),
         optional_input("cmpResidualKvOptional", "cmp_residual_kv", kInt32),
         not_computed("oriTopkLengthOptional", "cmpTopkLengthOptional"));
constexpr auto kMaskArguments = join(
    attribute<int64_t>("cmpRatio", "cmp_ratio"), attribute<int64_t>("oriMaskMode", "ori_mask_mode"),
    attribute<int64_t>("cmpMaskMode", "cmp_mask_mode"),
    attribute<int64_t>("oriWinLeft", "ori_win_left"),
    attribute<int64_t>("oriWinRight", "ori_win_right"),
    attribute<char*>("layoutQOptional", "layout"), attribute<char*>("layoutKvOptional"));
constexpr auto kKeys =
    join(optional_input("oriKvOptional", "ori_kv", kHalf),
         optional_input("cmpKvOptional", "cmp_kv", kHalf), not_computed("oriSparseIndicesOptional"),
         optional_input("cmpSparseIndicesOptional", "cmp_sparse_indices", kInt32));
constexpr auto kSinksAndMetadata = join(optional_input("sinksOptional", "sink", kFloat),
                                        optional_input("metadataOptional", "", kInt32));

}  // namespace

CANN_SIM_FUNCTION(aclnnSparseFlashMlaMetadata, {.compute = metadata_of}, kLengthArguments,
                  attribute<int64_t>("numHeadsQ"), attribute<int64_t>("numHeadsKv"),
                  attribute<int64_t>("headDim"), attribute<int64_t>("batchSize"),
                  attribute<int64_t>("maxSeqlenQ"), attribute<int64_t>("maxSeqlenOriKv"),
                  attribute<int64_t>("maxSeqlenCmpKv"), attribute<int64_t>("oriTopk"),
                  attribute<int64_t>("cmpTopk"), kMaskArguments, attribute<bool>("hasOriKv"),
                  attribute<bool>("hasCmpKv"), output("metadata"))

CANN_SIM_FUNCTION(
    aclnnSparseFlashMla,
    {.schema_name = "ascend::sparse_flash_mla",
     .workspace = 4096,
     .device = {.check = check_forward, .written = written_attention, .faults = {kStaleKeys}},
     .compute = attention},
    input("q", "query", kHalf), kKeys,
    optional_input("oriBlockTableOptional", "ori_block_table", kInt32),
    optional_input("cmpBlockTableOptional", "cmp_block_table", kInt32), kLengthArguments,
    kSinksAndMetadata, attribute<double>("softmaxScale", "scale_value"), kMaskArguments,
    attribute<int64_t>("topkValueMode"), attribute<bool>("returnSoftmaxLse", "return_softmax_lse"),
    output("attnOutOut"), optional_output("softmaxLseOutOptional"))

CANN_SIM_FUNCTION(aclnnSparseFlashMlaGrad,
                  {.schema_name = "ascend::sparse_flash_mla_grad",
                   .workspace = 8192,
                   .device = {.check = check_gradient,
                              .faults = {{Harm::bounds, rows_behind_sequences},
                                         kRowMinusOne,
                                         kRowsBeforeKeys,
                                         kFirstResidual}},
                   .compute = gradients},
                  input("query", "query", kHalf), input("dOut", "d_out", kHalf),
                  input("out", "out", kHalf), input("lse", "softmax_lse", kFloat), kKeys,
                  kLengthArguments, kSinksAndMetadata,
                  attribute<double>("scaleValue", "scale_value"), kMaskArguments,
                  output("dQueryOut"), output("dOriKvOutOptional"),
                  optional_output("dCmpKvOutOptional"), optional_output("dSinksOutOptional"),
                  optional_output("oriSoftmaxL1NormOptional", 5),
                  optional_output("cmpSoftmaxL1NormOptional", 4))
