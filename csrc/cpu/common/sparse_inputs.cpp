#include "cpu/common/sparse_inputs.h"

#include <algorithm>

#include "core/device_in_force.h"
#include "core/error.h"
#include "core/pack_hints.h"
#include "core/symbolic.h"
#include "core/tensor_checks.h"
#include "core/value_checks.h"
#include "cpu/common/vectorized.h"
#include "ops/compressed_keys.h"

namespace ascend_attn::cpu {
namespace {

bool all_in_range(const int32_t* indices, int64_t count, int64_t blocks) {
  int32_t lowest = -1;
  int32_t highest = -1;
  vectorized([&lowest, &highest, indices, count] {
    int32_t low = -1;
    int32_t high = -1;
    for (int64_t i = 0; i < count; ++i) {
      low = std::min(low, indices[i]);
      high = std::max(high, indices[i]);
    }
    lowest = low;
    highest = high;
  });
  return lowest >= -1 && highest < blocks;
}

}  // namespace

BlockTable::BlockTable(const KeyPages& pages, const at::Tensor& key, std::string_view argument)
    : argument_(argument) {
  if (pages.given()) {
    table_ = on_host(*pages.block_table).contiguous();
    num_blocks_ = key.size(0);
    block_size_ = key.size(1);
  }
}

int64_t BlockTable::capacity() const { return saturated_product(table_.size(1), block_size_); }

bool BlockTable::complete(const Sequence& sequence) const {
  const auto* begin = blocks(sequence);
  return std::all_of(begin, begin + blocks_of(sequence.keys, block_size_),
                     [this](int32_t block) { return block >= 0 && block < num_blocks_; });
}

void BlockTable::check_block(std::string_view op, const Sequence& sequence, int64_t key) const {
  const auto entry = key / block_size_;
  const auto block = blocks(sequence)[entry];
  check_value(block >= 0 && block < num_blocks_, op, argument_, "expected blocks in [0, ",
              num_blocks_, "), got ", block, " at (", sequence.batch, ", ", entry, ")");
}

void BlockTable::warn_of_cumulative_counts(std::string_view op,
                                           const std::vector<Sequence>& sequences) const {
  ascend_attn::warn_of_cumulative_counts(op, keys_of(sequences), table_, block_size_);
}

void check_index_rows(std::string_view op, NamedTensor argument, Layout layout, int64_t begin,
                      int64_t tokens, int64_t blocks) {
  const auto& indices = argument.tensor;
  const int64_t count = indices.size(-1);
  const TokenRows<int32_t> rows(indices, begin);
  for (int64_t token = 0; token < tokens; ++token) {
    const int32_t* row = rows.row(token);
    if (all_in_range(row, count, blocks)) [[likely]] {
      continue;
    }
    const auto* wrong = std::find_if(
        row, row + count, [blocks](int32_t index) { return index < -1 || index >= blocks; });
    const auto place =
        layout == Layout::BSND
            ? c10::str("(", begin / indices.size(1), ", ", token, ", 0, ", wrong - row, ")")
            : c10::str("(", begin + token, ", 0, ", wrong - row, ")");
    check_value(false, op, argument.name, "expected values in [-1, ", blocks, "), got ", *wrong,
                " at ", place);
  }
}

at::Tensor SparseInputs::other_value(std::string_view op, const at::Tensor& key,
                                     const at::Tensor& value) {
  if (!device_in_force()) {
    return with_dense_rows(value);
  }
  // NaN is no number, but it is key's.
  const bool equal =
      value.equal(key) ||
      value.eq(key).logical_or(value.isnan().logical_and(key.isnan())).all().item<bool>();
  check_value(equal, op, "value",
              "expected key's numbers, since the device reads key in place of value, got others; "
              "ascend_attn_ops.limits(None) computes with them on the CPU");
  return with_dense_rows(key);
}

void SparseInputs::read_packed_rows(int64_t rope_head_dim, int64_t tile_size) {
  const int64_t bytes_of_rope = rope_head_dim * static_cast<int64_t>(query.element_size());
  rope_size = rope_head_dim;
  size -= rope_size;
  query_rope = query.narrow(-1, size, rope_size);
  query = query.narrow(-1, 0, size);
  key_rope = key.narrow(-1, size, bytes_of_rope);
  form = {size + bytes_of_rope, tile_size};
}

void SparseInputs::read_compression(std::string_view op, int64_t cmp_ratio,
                                    const std::optional<at::Tensor>& cmp_residual_key) {
  ratio = cmp_ratio;
  residuals = read_residuals(op, {"cmp_residual_key", cmp_residual_key}, ratio, mode, sequences);
  for (size_t b = 0; b < sequences.size(); ++b) {
    sequences[b].batch = static_cast<int64_t>(b);
  }
}

void SparseInputs::check_indices(std::string_view op, Layout layout, Selectable selectable) const {
  const auto& indices = sparse_indices;
  const int64_t capacity = block_table.given() ? block_table.capacity() : key.size(-3);
  const bool bsnd = layout == Layout::BSND;
  const bool whole_batch = bsnd && selectable == Selectable::all_keys;
  for (const auto& sequence : sequences) {
    const int64_t keys = whole_batch ? capacity : sequence.keys;
    const int64_t tokens = whole_batch ? indices.size(1) : sequence.queries;
    check_index_rows(op, {"sparse_indices", indices}, layout, sequence.query_begin, tokens,
                     blocks_of(keys, block_size));
  }
}

void SparseInputs::check_blocks(std::string_view op) const {
  if (checks_values() && block_table.given()) {
    block_table.warn_of_cumulative_counts(op, sequences);
  }
  for (const auto& sequence : sequences) {
    if (!block_table.given() || sequence.queries == 0 || block_table.complete(sequence)) {
      continue;
    }
    if (!sparse_indices.defined()) {
      for (int64_t at = 0; at < sequence.keys; at += key.size(1)) {
        block_table.check_block(op, sequence, at);
      }
      continue;
    }
    const TokenRows<int32_t> indices(sparse_indices, sequence.query_begin);
    const auto visible = this->visible(sequence);
    for (int64_t token = 0; token < sequence.queries; ++token) {
      SelectedKeys selected(indices.row(token), sparse_indices.size(-1), block_size,
                            visible.end(token));
      for (int64_t at = 0; selected.next(&at, 1) > 0;) {
        block_table.check_block(op, sequence, at);
      }
    }
  }
}

void SparseInputs::zero_unused(std::initializer_list<at::Tensor> of_query,
                               std::initializer_list<at::Tensor> of_key) const {
  for (const auto& tensor : of_query) {
    zero_unused_tokens(tensor, token_count(query), sequences, &Sequence::queries);
  }
  for (const auto& tensor : of_key) {
    zero_unused_tokens(tensor, token_count(key), sequences, &Sequence::keys);
  }
}

}  // namespace ascend_attn::cpu
