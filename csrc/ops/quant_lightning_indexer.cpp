#include "ops/quant_lightning_indexer.h"

#include <utility>

#include "core/error.h"
#include "ops/sparse_rules.h"

namespace ascend_attn {
namespace {

constexpr Rule half(std::string_view argument) {
  return {argument, "float16", kAllDevices, Violation::type};
}
constexpr Rule kHalfWeights = half("weights");
constexpr Rule kHalfQueryScale = half("query_dequant_scale");
constexpr Rule kHalfKeyScale = half("key_dequant_scale");

}  // namespace

const OperatorLimits QuantLightningIndexer::limits{
    name,
    functions,
    // Ascend 950 has it for float8 and hifloat8.
    {{kA2A3, {at::kChar}}},
    {{"Nidx", "query heads of the indexer", {.one_of = {64}}, kA2A3.before(Cann::v9_1)},
     {"Nidx", "query heads of the indexer", {.min = 1, .max = 64}},
     kIndexDim,
     {"K", "selected keys per token", {.min = 1, .max = 2048}},
     kPageSize,
     kPreTokens,
     kNextTokens},
    {kNotEmpty, kHalfWeights, kHalfQueryScale, kHalfKeyScale}};

QuantLightningIndexer::Outputs QuantLightningIndexer::check_and_allocate(
    OutputSource outputs) const {
  const SparseRules rules(limits, layout, {"query", query}, {"key", key}, &pages, {.int8 = true});
  rules.check_weights({"weights", weights}, rules.heads());
  rules.check_weights({"query_dequant_scale", query_dequant_scale}, rules.heads());
  rules.check_lengths(actual_seq_lengths_query, actual_seq_lengths_key);
  rules.check_key_factors({"key_dequant_scale", key_dequant_scale});
  rules.check_sparse_mode(sparse_mode, {0, 3});
  check_value(query_quant_mode == 0, name, "query_quant_mode",
              "expected 0, a scale for each token and head, got ", query_quant_mode);
  check_value(key_quant_mode == 0, name, "key_quant_mode",
              "expected 0, a scale for each token and head, got ", key_quant_mode);
  rules.check_selection(sparse_count, pre_tokens, next_tokens);
  const auto& device_limits = rules.limits();
  device_limits.size("query", "Nidx", rules.heads());
  device_limits.size("query", "Didx", rules.head_size());
  for (const auto& [rule, tensor] :
       {std::pair(kHalfWeights, &weights), std::pair(kHalfQueryScale, &query_dequant_scale),
        std::pair(kHalfKeyScale, &key_dequant_scale)}) {
    const auto dtype = tensor->scalar_type();
    device_limits.rule(rule, dtype == at::kHalf, dtype_name(dtype));
  }
  return {outputs.tensor(rules.selection_sizes(sparse_count), query.options().dtype(at::kInt))};
}

}  // namespace ascend_attn
