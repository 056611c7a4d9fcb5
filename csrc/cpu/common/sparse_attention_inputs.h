// Inputs of the CPU kernels of SparseFlashAttention and its gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

#include "core/layout.h"
#include "core/sequence_lengths.h"
#include "core/sparse_mode.h"
#include "cpu/common/key_rows.h"
#include "cpu/common/query_key_product.h"
#include "cpu/common/sparse_indices.h"
#include "cpu/common/token_rows.h"
#include "ops/key_pages.h"
#include "ops/sparse_rules.h"

namespace ascend_attn::cpu {

// The arguments of one call, with validated values.
struct SparseAttentionInputs {
  template <typename Op>
  SparseAttentionInputs(const Op& op, Selectable selectable)
      : sequences(read_sequences(op.name, op.options.layout.value(), op.query, op.key, pages_of(op),
                                 op.options.actual_seq_lengths_query,
                                 op.options.actual_seq_lengths_key)),
        block_table(pages_of(op), op.key),
        query(with_dense_rows(op.query)),
        key(with_dense_rows(op.key)),
        value(same_rows(op.key, op.value) ? key : with_dense_rows(op.value)),
        query_rope(op.options.query_rope ? with_dense_rows(*op.options.query_rope) : at::Tensor()),
        key_rope(op.options.key_rope ? with_dense_rows(*op.options.key_rope) : at::Tensor()),
        sparse_indices(with_dense_rows(with_head_axis(op.sparse_indices, op.query))),
        heads(query.size(-2)),
        size(query.size(-1)),
        rope_size(query_rope.defined() ? query_rope.size(-1) : 0),
        block_size(op.options.sparse_block_size),
        mode(static_cast<SparseMode>(op.options.sparse_mode)) {
    check_sparse_indices(op.name, op.options.layout.value(), sparse_indices,
                         block_table.given() ? block_table.capacity() : op.key.size(-3), sequences,
                         selectable, block_size);
    if (block_table.given()) {
      check_blocks(op.name);
    }
  }

  bool value_is_key() const { return value.is_same(key); }

  std::vector<Sequence> sequences;
  BlockTable block_table;
  at::Tensor query, key, value;
  at::Tensor query_rope, key_rope;  // undefined if absent
  at::Tensor sparse_indices;
  int64_t heads, size, rope_size, block_size;
  SparseMode mode;

 private:
  template <typename Op>
  static KeyPages pages_of(const Op& op) {
    if constexpr (requires { op.pages; }) {
      return op.pages;
    } else {
      static const std::optional<at::Tensor> none;
      return {{}, none};
    }
  }

  // Checks that the cache has every block that a query selects keys of.
  void check_blocks(std::string_view op) const;

  // Absorbed multi-head latent attention passes one tensor as both key and value.
  static bool same_rows(const at::Tensor& a, const at::Tensor& b) {
    return a.const_data_ptr() == b.const_data_ptr() && a.sizes() == b.sizes() &&
           a.strides() == b.strides();
  }
};

// The same for one sequence, with tokens counted from its first.
template <typename Input>
struct SequenceInputs {
  SequenceInputs(const SparseAttentionInputs& inputs, const Sequence& of)
      : sequence(of),
        query(inputs.query, of.query_begin),
        query_rope(inputs.query_rope.defined() ? TokenRows<Input>(inputs.query_rope, of.query_begin)
                                               : TokenRows<Input>()),
        key(inputs.key, inputs.block_table, of),
        key_rope(inputs.key_rope.defined() ? KeyRows<Input>(inputs.key_rope, inputs.block_table, of)
                                           : KeyRows<Input>()),
        value(inputs.value, inputs.block_table, of),
        sparse_indices(inputs.sparse_indices, of.query_begin),
        count(inputs.sparse_indices.size(-1)),
        block_size(inputs.block_size),
        visible(visible_keys(inputs.mode, of.queries, of.keys)) {}

  SelectedKeys selected(int64_t token) const {
    return {sparse_indices.row(token), count, block_size, visible.end(token)};
  }

  Sequence sequence;
  TokenRows<Input> query, query_rope;
  KeyRows<Input> key, key_rope, value;
  TokenRows<int32_t> sparse_indices;
  int64_t count, block_size;
  KeptKeys visible;
};

inline void SparseAttentionInputs::check_blocks(std::string_view op) const {
  for (const auto& sequence : sequences) {
    if (sequence.queries == 0 || block_table.complete(sequence)) {
      continue;
    }
    const TokenRows<int32_t> indices(sparse_indices, sequence.query_begin);
    const auto visible = visible_keys(mode, sequence.queries, sequence.keys);
    for (int64_t token = 0; token < sequence.queries; ++token) {
      SelectedKeys selected(indices.row(token), sparse_indices.size(-1), block_size,
                            visible.end(token));
      for (int64_t key = 0; selected.next(&key, 1) > 0;) {
        block_table.check_block(op, sequence, key);
      }
    }
  }
}

// The tile of values that belongs to a tile of keys; the same tile if value is key.
template <typename Input, typename Operand>
class ValueTile {
 public:
  ValueTile(bool value_is_key, int64_t max_keys, int64_t size)
      : size_(size), values_(value_is_key ? 0 : max_keys, round_up(size, depth_step<Operand>)) {}

  const Tile<Operand>& load(const KeyRows<Input>& value, const Tile<Operand>& keys,
                            const int64_t* positions, int64_t count, int64_t tile_rows) const {
    if (values_.data() == nullptr) {
      return keys;
    }
    gather_rows(value, positions, count, size_, values_);
    zero_rows(values_, count, tile_rows);
    return values_;
  }

 private:
  int64_t size_;
  Tile<Operand> values_;
};

}  // namespace ascend_attn::cpu
