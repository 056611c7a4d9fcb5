#include "ops/kv_quant_sparse_flash_attention.h"

#include <limits>
#include <utility>

#include "core/error.h"
#include "core/symbolic.h"
#include "ops/sparse_rules.h"

namespace ascend_attn {
namespace {

// Returns the bytes of a row: the numbers, the rope in query's dtype, and the scales in float32.
c10::SymInt bytes_of_row(const KvQuantSparseFlashAttention& op) {
  if (op.query.dim() == 0) {
    return 0;
  }
  const auto size = op.query.sym_size(-1) - op.rope_head_dim;
  const auto tiles = (size + (op.tile_size - 1)) / op.tile_size;
  return size + op.rope_head_dim * static_cast<int64_t>(op.query.element_size()) +
         tiles * static_cast<int64_t>(sizeof(float));
}

void check_quantization(const KvQuantSparseFlashAttention& op) {
  constexpr int64_t kByTiles = 2;
  for (const auto& [argument, mode] : {std::pair("key_quant_mode", op.key_quant_mode),
                                       std::pair("value_quant_mode", op.value_quant_mode)}) {
    check_value(mode == kByTiles, op.name, argument,
                "expected 2, a scale for each tile of a row, got ", mode);
  }
  constexpr int64_t kLargestTile = std::numeric_limits<int32_t>::max();
  check_value(op.tile_size >= 1 && op.tile_size <= kLargestTile, op.name, "tile_size",
              "expected 1 to ", kLargestTile, " elements per scale, got ", op.tile_size);
  check_value(op.rope_head_dim >= 0 &&
                  (op.query.dim() == 0 || at_most(op.rope_head_dim, op.query.sym_size(-1))),
              op.name, "rope_head_dim",
              "expected at least 0 and at most the last size of query, "
              "shape ",
              op.query.sym_sizes(), ", got ", op.rope_head_dim);
}

}  // namespace

const OperatorLimits KvQuantSparseFlashAttention::limits{
    name,
    functions,
    sparse_dtypes(),
    {kAttentionHeads,
     {"N1", "query heads", {.one_of = {1, 2, 4, 8, 16, 32, 48, 64, 128}}, k950},
     {"D", "head size with rope", {.one_of = {576}}},
     kRopeDim,
     {"tile_size", "elements per scale", {.one_of = {128}}},
     // Larger blocks are computed wrong where the keys of a row end within one, or have a gap.
     {"sparse_block_size", "keys per block", {.one_of = {1}}},
     kPageSize,
     kPreTokens,
     kNextTokens},
    {kNotEmpty, kSelection}};

KvQuantSparseFlashAttention::Outputs KvQuantSparseFlashAttention::check_and_allocate(
    OutputSource outputs) const {
  check_quantization(*this);
  const SparseRules rules(limits, layout, {"query", query}, {"key", key}, &pages,
                          {.layout = "layout_kv", .bytes_of_row = bytes_of_row(*this)});
  rules.check_indices_of_keys();
  rules.check_sparse_indices({"sparse_indices", sparse_indices});
  rules.check_lengths(actual_seq_lengths_query, actual_seq_lengths_key);
  rules.check_sparse_mode(sparse_mode, {0, 3});
  check_scale_value(name, scale_value);
  check_value(sparse_block_size >= 1, name, "sparse_block_size",
              "expected a positive number of keys per block, got ", sparse_block_size);
  const auto& device_limits = rules.limits();
  device_limits.size("query", "N1", rules.heads());
  device_limits.size("query", "D", rules.head_size());
  device_limits.size("rope_head_dim", "Dr", rope_head_dim);
  device_limits.size("tile_size", "tile_size", tile_size);
  device_limits.size("sparse_block_size", "sparse_block_size", sparse_block_size);
  const auto count = sparse_indices.sym_size(-1);
  device_limits.rule(kSelection, count.maybe_as_int() != 0, count);
  device_limits.size("pre_tokens", "pre_tokens", pre_tokens);
  device_limits.size("next_tokens", "next_tokens", next_tokens);
  auto sizes = c10::SymDimVector(query.sym_sizes().begin(), query.sym_sizes().end());
  sizes.back() = sizes.back() - rope_head_dim;
  return {outputs.tensor(sizes, query.options())};
}

}  // namespace ascend_attn
