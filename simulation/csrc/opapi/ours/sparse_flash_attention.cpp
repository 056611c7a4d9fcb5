// SparseFlashAttention, its gradient, and the same over keys in int8.
// Prototypes: docs/operators/sparse_flash_attention.md.
#include <ATen/TensorOperators.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/maximum.h>

#include <algorithm>
#include <limits>

#include "opapi/ours/paged_keys.h"
#include "opapi/ours/sparse_rows.h"

using namespace cann_sim;

namespace {

// The statistics are (1, T, N).
at::Tensor written_attention(const Call& call, std::string_view name, const at::Tensor& output) {
  return rows_of_sequences(call, output, name == "attentionOut" ? 0 : 1, "layoutQueryOptional",
                           "actualSeqLengthsQueryOptional");
}

// Faults of the kernels.

constexpr int64_t kLargestOfSmallBlocks = 4;

bool has_small_blocks(const Call& call) {
  return call.get<int64_t>("sparseBlockSize") <= kLargestOfSmallBlocks;
}

std::string find_in_forward(const Call& call,
                            const std::function<std::string(const SparseRow&)>& fault) {
  const bool packed = call.is_tnd("layoutQueryOptional");
  return find_in_rows(call, {"query", "actualSeqLengthsQueryOptional", packed},
                      {"key", "actualSeqLengthsKvOptional", packed,
                       call.get<std::string>("layoutKvOptional") == "PA_BSND"},
                      fault);
}

// In layout BSND the gradient ignores lengths.
std::string find_in_gradient(const Call& call,
                             const std::function<std::string(const SparseRow&)>& fault) {
  if (call.is_tnd("layoutOptional")) {
    return find_in_rows(call, {"query", "actualSeqLengthsQueryOptional", true},
                        {"key", "actualSeqLengthsKvOptional", true}, fault);
  }
  return find_in_rows(call, {"query"}, {"key"}, fault);
}

std::string block_size(const Call& call) {
  const auto block = call.get<int64_t>("sparseBlockSize");
  return (block & (block - 1)) == 0
             ? ""
             : c10::str("sparse_block_size ", block, " is no power of two: the results are wrong");
}

// The last visible block is shorter than the others and does not come last.
std::string cut_block(const SparseRow& row) {
  const auto cut = row.visible / row.block;
  const auto leading = row.slots.first(row.leading());
  const size_t slot = std::ranges::find(leading, cut) - leading.begin();
  return row.visible % row.block == 0 || slot + 1 >= leading.size()
             ? ""
             : row.text(c10::str("the cut block ", cut), slot) +
                   ": it is right in the last one only";
}

std::string cut_block_of_gradient(const Call& call) { return find_in_gradient(call, cut_block); }

std::string hole(const Call& call) {
  return has_small_blocks(call)
             ? find_in_forward(
                   call,
                   [](const SparseRow& row) -> std::string {
                     const auto slot = row.leading();
                     const bool more = std::ranges::any_of(row.slots.subspan(slot),
                                                           [](int32_t x) { return x != -1; });
                     return more ? row.text("-1", slot) +
                                       " and keys behind it: the device takes some of those"
                                 : "";
                   })
             : "";
}

// A row that sees keys and selects none: its output is infinite, or with small blocks the mean of
// as many keys of almost no score as it has slots.
void spoil_empty_rows(const Call& call) {
  if (!has_faults(Harm::results)) {
    return;
  }
  const bool small = has_small_blocks(call);
  const auto out = call.tensor("attentionOut");
  const auto max = call.optional_tensor("softmaxMax");
  const auto sum = call.optional_tensor("softmaxSum");
  const bool packed = call.is_tnd("layoutQueryOptional");
  find_in_forward(call, [&](const SparseRow& row) -> std::string {
    if (row.slots.empty() || row.slots[0] != -1) {
      return {};
    }
    const auto of_row = [&](const at::Tensor& x, int64_t axis) {
      return packed ? x.select(axis, row.number)
                    : x.select(0, row.number / out.size(1)).select(axis, row.number % out.size(1));
    };
    of_row(out, 0).fill_(small ? 1e-26 : std::numeric_limits<double>::infinity());
    if (small && max && max->numel() > 0) {
      of_row(*max, 1).fill_(-2e38);
      of_row(*sum, 1).fill_(static_cast<int64_t>(row.slots.size()));
    }
    return {};
  });
}

std::string padding_of_gradient(const Call& call) {
  return find_in_gradient(call, [](const SparseRow& row) -> std::string {
    const auto slot = row.leading();
    return slot == row.slots.size() ? ""
                                    : row.text("-1", slot) + ": the device reads out of bounds";
  });
}

// Whether the device reads key in place of value, and value is another tensor.
bool reads_key_for_value(const Call& call) {
  const auto& key = call.get<TensorView>("key");
  const auto* value = call.find<TensorView>("value");
  const bool reads = value && (value->data != key.data || value->offset != key.offset ||
                               value->strides != key.strides);
  if (reads) {
    TORCH_WARN_ONCE("sparse attention reads key in place of value, which is another tensor");
  }
  return reads;
}

std::string few_large_blocks(const Call& call) {
  constexpr int64_t kLargestBlock = 128;
  constexpr int64_t kFewest = 8;
  const auto count = call.get<TensorView>("sparseIndices").sizes.back();
  return call.get<int64_t>("sparseBlockSize") < kLargestBlock || count >= kFewest
             ? ""
             : c10::str("sparse_block_size 128 with ", count,
                        " indices a row: the device writes behind a core's memory");
}

std::string lengths_of_gradient(const Call& call) {
  if (call.is_tnd("layoutOptional")) {
    return {};
  }
  for (const auto& [name, tensor] : {std::pair("actualSeqLengthsQueryOptional", "query"),
                                     {"actualSeqLengthsKvOptional", "key"}}) {
    const auto size = call.get<TensorView>(tensor).sizes.at(1);
    if (call.find<TensorView>(name) &&
        std::ranges::any_of(call.elements(name), [&](int64_t x) { return x != size; })) {
      return c10::str(name, " in layout BSND: the device ignores them");
    }
  }
  return {};
}

// The kernel of keys in int8 sets rows behind a length to zero.
std::string rows_behind_lengths(const Call& call) {
  if (cann_version() >= kCann91 || call.is_tnd("layoutQueryOptional") ||
      !call.find<TensorView>("actualSeqLengthsQueryOptional")) {
    return {};
  }
  const auto size = call.get<TensorView>("query").sizes.at(1);
  const auto lengths = call.elements("actualSeqLengthsQueryOptional");
  return std::ranges::all_of(lengths, [&](int64_t x) { return x == size; })
             ? ""
             : "rows behind a length in layout BSND: the device writes out of bounds";
}

const std::vector<KernelFault> kInt8Faults{{Harm::bounds, rows_behind_lengths},
                                           {Harm::results, hole}};
const std::vector<KernelFault> kForwardFaults{{Harm::results, block_size}, {Harm::results, hole}};
const std::vector<KernelFault> kGradientFaults{{Harm::results, block_size},
                                               {Harm::bounds, few_large_blocks},
                                               {Harm::results, lengths_of_gradient},
                                               {Harm::bounds, padding_of_gradient},
                                               {Harm::results, cut_block_of_gradient}};

const PagedKeys kKeys{
    .caches = {{"key", "key"}, {"value", "value"}, {"keyRopeOptional", "key_rope"}},
    .lengths = "actualSeqLengthsKvOptional",
    .query_layout = "layoutQueryOptional",
    .layout = "layoutKvOptional"};

// Keys and values in the layout of the queries. A missing value is the key.
OperatorArguments keys_and_values(const Call& call) {
  auto arguments = kKeys.in_layout_of_query(call);
  if (!call.find<TensorView>("value") || (has_small_blocks(call) && reads_key_for_value(call))) {
    arguments["value"] = arguments.try_emplace("key", call.tensor("key")).first->second;
  }
  return arguments;
}

torch::jit::Stack attention(const Call& call) { return call.results(keys_and_values(call)); }

// Without a value, the gradient of the key has both parts.
torch::jit::Stack gradients(const Call& call) {
  if (call.find<TensorView>("value")) {
    return reads_key_for_value(call) ? call.results({{"value", call.tensor("key")}})
                                     : call.results();
  }
  auto results = call.results({{"value", call.tensor("key")}});
  results[1] = results[1].toTensor() + results[2].toTensor();
  return results;
}

// A sink is a key of no value that every query of a head sees: it takes part in the softmax alone.
torch::jit::Stack attention_with_sinks(const Call& call) {
  const auto sinks = call.optional_tensor("sinksOptional");
  if (!sinks) {
    return attention(call);
  }
  auto arguments = keys_and_values(call);
  arguments.try_emplace("query", call.tensor("query"));
  arguments.try_emplace("query_rope", call.optional_tensor("queryRopeOptional"));
  arguments.try_emplace("key", call.tensor("key"));
  arguments.try_emplace("value", call.optional_tensor("value"));
  arguments.try_emplace("key_rope", call.optional_tensor("keyRopeOptional"));
  for (const auto* name : {"query", "query_rope", "key", "value", "key_rope"}) {
    auto& argument = arguments[name];
    if (argument.isTensor()) {
      argument = argument.toTensor().to(at::kFloat);
    }
  }
  const auto results = call.results(arguments);
  // (..., Nk, S, N / Nk)
  const auto max_of_keys = results[1].toTensor();
  const auto of_heads = sinks->to(at::kFloat).view({max_of_keys.size(-3), 1, max_of_keys.size(-1)});
  const auto max = at::maximum(max_of_keys, of_heads);
  const auto sum_of_keys = results[2].toTensor() * at::exp(max_of_keys - max);
  const auto sum = sum_of_keys + at::exp(of_heads - max);
  const auto share = (sum_of_keys / sum).transpose(-3, -2).flatten(-2).unsqueeze(-1);
  return {results[0].toTensor() * share, max, sum};
}

// The statistics have to be given where they are asked for, and the tiling takes none of pages.
void check_statistics(const Call& call) {
  if (!call.get<bool>("returnSoftmaxLse")) {
    return;
  }
  for (const auto* name : {"softmaxMax", "softmaxSum"}) {
    if (!call.find<TensorView>(name)) {
      throw Refusal(kNoTensor, c10::str(name, " is nullptr"));
    }
  }
  if (call.get<std::string>("layoutKvOptional") == "PA_BSND") {
    throw Refusal(kTiling, "when returnSoftmaxLse is true, layoutKv PA_BSND is not supported");
  }
}

const Function kAttention{.schema_name = "ascend::sparse_flash_attention",
                          .workspace = 4096,
                          .device = {.check = check_statistics,
                                     .written = written_attention,
                                     .spoil = spoil_empty_rows,
                                     .faults = kForwardFaults},
                          .compute = attention_with_sinks};

constexpr auto kTensors =
    join(input("query", "query", kHalf), input("key", "key", kHalf),
         optional_input("value", "value", kHalf), input("sparseIndices", "sparse_indices", kInt32));
constexpr auto kLengths =
    join(optional_input("actualSeqLengthsQueryOptional", "actual_seq_lengths_query", kInt32),
         optional_input("actualSeqLengthsKvOptional", "actual_seq_lengths_key", kInt32));
constexpr auto kRopes = join(optional_input("queryRopeOptional", "query_rope", kHalf),
                             optional_input("keyRopeOptional", "key_rope", kHalf));

constexpr auto kScale = join(attribute<double>("scaleValue", "scale_value"),
                             attribute<int64_t>("sparseBlockSize", "sparse_block_size"));
constexpr auto kMode = join(attribute<int64_t>("sparseMode", "sparse_mode"),
                            attribute<int64_t>("preTokens", "pre_tokens"),
                            attribute<int64_t>("nextTokens", "next_tokens"));
constexpr auto kForward =
    join(kTensors, optional_input("blockTableOptional", "", kInt32), kLengths);

constexpr auto kRest =
    join(kScale, attribute<char*>("layoutQueryOptional", "layout"),
         attribute<char*>("layoutKvOptional"), kMode, attribute<int64_t>("attentionMode"),
         attribute<bool>("returnSoftmaxLse"), output("attentionOut").of_dtype_of("query"),
         optional_output("softmaxMax").in(kFloat), optional_output("softmaxSum").in(kFloat));

}  // namespace

CANN_SIM_FUNCTION(aclnnSparseFlashAttention, kAttention, kForward,
                  input("queryRopeOptional", "query_rope", kHalf).or_status(kTiling),
                  input("keyRopeOptional", "key_rope", kHalf).or_status(kTiling), kRest)
// torch_npu calls it where there are sinks.
CANN_SIM_FUNCTION(aclnnSparseFlashAttentionV2, kAttention, kForward, kRopes,
                  optional_input("sinksOptional"), kRest)

CANN_SIM_FUNCTION(aclnnSparseFlashAttentionGrad,
                  {.schema_name = "ascend::sparse_flash_attention_grad",
                   .workspace = 8192,
                   .device = {.faults = kGradientFaults},
                   .compute = gradients},
                  kTensors, input("dOut", "d_out", kHalf), input("out", "out", kHalf),
                  input("softmaxMax", "softmax_max", kFloat),
                  input("softmaxSum", "softmax_sum", kFloat), kLengths, kRopes, kScale,
                  attribute<char*>("layoutOptional", "layout"), kMode,
                  attribute<bool>("deterministic", "deterministic"),
                  output("dQueryOut").of_dtype_of("query"), output("dKeyOut").of_dtype_of("key"),
                  output("dValueOut").of_dtype_of("value"),
                  optional_output("dQueryRopeOutOptional"), optional_output("dKeyRopeOutOptional"))

namespace {

const PagedKeys kKeysInInt8{.caches = {{"key", "key"}},
                            .lengths = "actualSeqLengthsKvOptional",
                            .query_layout = "layoutQueryOptional",
                            .layout = "layoutKvOptional"};

void check_modes(const Call& call) {
  for (const auto& [name, value] : {std::pair("attentionMode", 2),
                                    {"keyQuantMode", 2},
                                    {"valueQuantMode", 2},
                                    {"quantScaleRepoMode", 1}}) {
    if (call.get<int64_t>(name) != value) {
      throw Refusal(kTiling, c10::str(name, " must be ", value));
    }
  }
}

// value has key's dtype, and is not read.
torch::jit::Stack attention_over_int8(const Call& call) {
  return call.results(kKeysInInt8.in_layout_of_query(call));
}

}  // namespace

CANN_SIM_FUNCTION(
    aclnnKvQuantSparseFlashAttention,
    {.schema_name = "ascend::kv_quant_sparse_flash_attention",
     .workspace = 4096,
     .device = {.check = check_modes,
                .written = written_attention,
                .spoil = spoil_empty_rows,
                .faults = kInt8Faults},
     .compute = attention_over_int8},
    input("query", "query", kHalf), input("key", "key", {ACL_INT8}),
    input("value", "value", {ACL_INT8}), input("sparseIndices", "sparse_indices", kInt32),
    optional_input("keyDequantScaleOptional"), optional_input("valueDequantScaleOptional"),
    optional_input("blockTableOptional", "", kInt32), kLengths,
    attribute<double>("scaleValue", "scale_value"),
    attribute<int64_t>("keyQuantMode", "key_quant_mode"),
    attribute<int64_t>("valueQuantMode", "value_quant_mode"),
    attribute<int64_t>("sparseBlockSize", "sparse_block_size"),
    attribute<char*>("layoutQueryOptional", "layout"), attribute<char*>("layoutKvOptional"), kMode,
    attribute<int64_t>("attentionMode"), attribute<int64_t>("quantScaleRepoMode"),
    attribute<int64_t>("tileSize", "tile_size"), attribute<int64_t>("ropeHeadDim", "rope_head_dim"),
    output("attentionOut").of_dtype_of("query"))
