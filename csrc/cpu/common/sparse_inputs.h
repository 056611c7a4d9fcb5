// Inputs of the CPU kernels of the sparse operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>
#include <string_view>
#include <vector>

#include "core/memory.h"
#include "core/sequence_lengths.h"
#include "core/sparse_mode.h"
#include "core/tensor_checks.h"
#include "cpu/common/key_rows.h"
#include "cpu/common/sparse_indices.h"
#include "cpu/common/token_rows.h"
#include "ops/sparse_indices.h"

namespace ascend_attn::cpu {

template <typename Input, typename Keys = KeyRows<Input>, typename Ropes = Keys>
struct SequenceInputs;

// The bytes of a row of keys in int8 (cpu/common/packed_rows.h).
struct RowForm {
  int64_t first_scale = 0;
  int64_t tile = 1;  // numbers per scale
};

// Checks that every index of `tokens` rows from `begin` on is in [-1, blocks). The indices have the
// axis of heads.
void check_index_rows(std::string_view op, NamedTensor argument, Layout layout, int64_t begin,
                      int64_t tokens, int64_t blocks);

// The arguments of one call, with dense rows and validated values. A tensor that the operator or
// the call lacks is undefined; without a value of its own, the operator takes key.
class SparseInputs {
 public:
  template <typename Op>
  explicit SparseInputs(const Op& op, Selectable selectable = Selectable::keys_of_sequence)
      : SparseInputs(op, options_of(op), selectable) {}

  // Zeroes the tokens that belong to no sequence, in dense outputs with the tokens of query or key.
  void zero_unused(std::initializer_list<at::Tensor> of_query,
                   std::initializer_list<at::Tensor> of_key = {}) const;
  bool value_is_key() const { return same_elements(value, key); }
  // The rows of every sequence.
  template <typename Input, typename Rows = SequenceInputs<Input>>
  std::vector<Rows> by_sequence() const {
    std::vector<Rows> result;
    for (const auto& sequence : sequences) {
      result.emplace_back(*this, sequence);
    }
    return result;
  }

  std::vector<Sequence> sequences;
  BlockTable block_table;
  at::Tensor query, key, value, query_rope, key_rope, sparse_indices;
  int64_t heads, size;
  int64_t rope_size = 0;
  int64_t block_size = 1;
  SparseMode mode;
  int64_t ratio = 1;               // tokens that a key stands for
  std::vector<int64_t> residuals;  // of every sequence, where they matter
  RowForm form;

  // The keys that the queries of a sequence see.
  KeptKeys visible(const Sequence& sequence) const {
    return residuals.empty() ? visible_keys(mode, sequence.queries, sequence.keys)
                             : visible_compressed_keys(mode, sequence.queries, sequence.keys, ratio,
                                                       residuals[sequence.batch]);
  }

 private:
  template <typename Op>
  static const auto& options_of(const Op& op) {
    if constexpr (requires { op.options; }) {
      return op.options;
    } else {
      return op;
    }
  }

  template <typename Op, typename Options>
  SparseInputs(const Op& op, const Options& options, Selectable selectable)
      : query(with_dense_rows(op.query)),
        key(with_dense_rows(op.key)),
        value(key),
        heads(query.size(-2)),
        size(query.size(-1)),
        mode(static_cast<SparseMode>(options.sparse_mode)) {
    const auto layout = options.layout.value();
    if constexpr (requires { op.pages; }) {
      block_table = BlockTable(op.pages, op.key);
      sequences = read_sequences(op.name, layout, op.query, op.key, op.pages,
                                 options.actual_seq_lengths_query, options.actual_seq_lengths_key);
    } else {
      sequences = read_sequences(op.name, layout, op.query, op.key,
                                 options.actual_seq_lengths_query, options.actual_seq_lengths_key);
    }
    if constexpr (requires { op.cmp_residual_key; }) {
      read_compression(op.name, op.cmp_ratio, op.cmp_residual_key);
    }
    if constexpr (requires { op.tile_size; }) {
      read_packed_rows(op.rope_head_dim, op.tile_size);
    } else if constexpr (requires { op.value; }) {
      value = same_rows(op.key, op.value) ? key : other_value(op.name, op.key, op.value);
    }
    if constexpr (requires { options.query_rope; }) {
      if (options.query_rope) {
        query_rope = with_dense_rows(*options.query_rope);
        key_rope = with_dense_rows(*options.key_rope);
        rope_size = query_rope.size(-1);
      }
    }
    if constexpr (requires { options.sparse_block_size; }) {
      block_size = options.sparse_block_size;
    }
    if constexpr (requires { op.check_key_lengths(sequences); }) {
      op.check_key_lengths(sequences);
    }
    if constexpr (requires { op.sparse_indices; }) {
      sparse_indices = with_dense_rows(with_head_axis(on_host(op.sparse_indices), op.query));
      check_indices(op.name, layout, selectable);
    }
    check_blocks(op.name);
  }

  // Divides the queries and rows of keys that have their rope behind the latent part.
  void read_packed_rows(int64_t rope_head_dim, int64_t tile_size);
  // Reads how many tokens the keys of each sequence stand for.
  void read_compression(std::string_view op, int64_t cmp_ratio,
                        const std::optional<at::Tensor>& cmp_residual_key);
  // Checks that every index is in [-1, number of key blocks).
  void check_indices(std::string_view op, Layout layout, Selectable selectable) const;
  // Checks that a paged cache has every block that a query selects keys of.
  void check_blocks(std::string_view op) const;

  // Returns the rows of a value that is a tensor of its own. Devices read key in place of it, so
  // that within their limits it has key's numbers.
  static at::Tensor other_value(std::string_view op, const at::Tensor& key,
                                const at::Tensor& value);
  // Absorbed multi-head latent attention passes one tensor as both key and value.
  static bool same_rows(const at::Tensor& a, const at::Tensor& b) {
    return a.const_data_ptr() == b.const_data_ptr() && a.sizes() == b.sizes() &&
           a.strides() == b.strides();
  }
};

// The same for one sequence, with tokens counted from its first.
template <typename Input, typename Keys, typename Ropes>
struct SequenceInputs {
  using Element = Input;

  SequenceInputs(const SparseInputs& inputs, const Sequence& of)
      : sequence(of),
        query(inputs.query, of.query_begin),
        query_rope(inputs.query_rope, of.query_begin),
        key(rows_of(inputs.key, inputs, of)),
        key_rope(inputs.key_rope, inputs.block_table, of),
        value(rows_of(inputs.value, inputs, of)),
        sparse_indices(inputs.sparse_indices, of.query_begin),
        count(inputs.sparse_indices.defined() ? inputs.sparse_indices.size(-1) : 0),
        block_size(inputs.block_size),
        visible(inputs.visible(of)) {}

  // The row of a token in outputs.
  int64_t row(int64_t token) const { return sequence.query_begin + token; }
  SelectedKeys selected(int64_t token) const {
    return {sparse_indices.row(token), count, block_size, visible.end(token)};
  }
  // The number of indices that a token reads: it sees no more keys.
  int64_t slots(int64_t token) const { return std::min(count, visible.end(token)); }

  Sequence sequence;
  TokenRows<Input> query, query_rope;
  Keys key;
  Ropes key_rope;
  Keys value;
  TokenRows<int32_t> sparse_indices;
  int64_t count, block_size;
  KeptKeys visible;

 private:
  static Keys rows_of(const at::Tensor& keys, const SparseInputs& inputs, const Sequence& of) {
    if constexpr (requires { Keys(keys, inputs.block_table, of, inputs.form); }) {
      return Keys(keys, inputs.block_table, of, inputs.form);
    } else {
      return Keys(keys, inputs.block_table, of);
    }
  }
};

}  // namespace ascend_attn::cpu
