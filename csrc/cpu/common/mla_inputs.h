// Inputs of the CPU kernels of sparse_flash_mla: a window of the original keys and the compressed
// keys, joined to one list. Its first positions are the original keys of the sequence.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "core/sequence_lengths.h"
#include "core/sparse_mode.h"
#include "cpu/common/key_rows.h"
#include "cpu/common/sparse_indices.h"
#include "cpu/common/token_rows.h"
#include "ops/sparse_flash_mla.h"

namespace ascend_attn::cpu {

// Iterates over the keys of one query, a chunk at a time: a span of original keys, then compressed
// keys. These are the first `compressed` of the sequence or, with indices, those that a row of
// indices selects up to its first -1. Indices from `compressed` on are passed over.
class JoinedKeys {
 public:
  struct Window {
    int64_t begin;
    int64_t end;
  };

  JoinedKeys(Window window, int64_t originals, int64_t compressed, const int32_t* indices,
             int64_t count)
      : window_(window), originals_(originals), compressed_(compressed), indices_(indices) {
    int64_t slots = compressed;
    if (indices != nullptr) {
      const auto* end = indices + std::min(count, compressed);
      slots = std::find(indices, end, -1) - indices;
    }
    end_ = window_keys() + slots;
  }

  // Writes the next positions, and returns how many: 0 at the end.
  int64_t next(int64_t* positions, int64_t capacity) {
    int64_t written = 0;
    for (; at_ < end_ && written < capacity; ++at_) {
      const int64_t slot = at_ - window_keys();
      if (slot < 0) {
        positions[written++] = window_.begin + at_;
      } else if (indices_ == nullptr) {
        positions[written++] = originals_ + slot;
      } else if (indices_[slot] < compressed_) {
        positions[written++] = originals_ + indices_[slot];
      }
    }
    return written;
  }

  int64_t size() const { return end_ - at_; }
  // Divides the keys into parts of `keys`.
  int64_t parts(int64_t keys) const { return blocks_of(size(), keys); }
  JoinedKeys part(int64_t index, int64_t keys) const {
    auto result = *this;
    result.at_ += index * keys;
    result.end_ = std::min(result.at_ + keys, end_);
    return result;
  }

 private:
  int64_t window_keys() const { return window_.end - window_.begin; }

  Window window_;
  int64_t originals_;
  int64_t compressed_;
  const int32_t* indices_;
  int64_t at_ = 0;  // counts window keys, then slots
  int64_t end_ = 0;
};

// The rows of the joined keys of one sequence.
template <typename T>
class JoinedKeyRows {
 public:
  JoinedKeyRows() = default;
  JoinedKeyRows(KeyRows<T> originals, KeyRows<T> compressed, int64_t count)
      : originals_(originals), compressed_(compressed), count_(count) {}

  const T* row(int64_t key) const {
    return key < count_ ? originals_.row(key) : compressed_.row(key - count_);
  }

 private:
  KeyRows<T> originals_;
  KeyRows<T> compressed_;
  int64_t count_ = 0;
};

// One sequence of a call, and which keys its queries see.
struct MlaSequence {
  Sequence originals;
  Sequence compressed;
  KeptKeys window;
  KeptKeys visible;       // of the compressed keys
  int64_t blind_queries;  // the first queries, which stand before all keys and see none

  int64_t keys() const { return originals.keys + compressed.keys; }
  // The keys of a query; `indices` is its row, or null.
  JoinedKeys keys_of(int64_t query, const int32_t* indices, int64_t count) const {
    if (query < blind_queries) {
      return {{0, 0}, originals.keys, 0, nullptr, 0};
    }
    return {{window.begin(query), window.end(query)},
            originals.keys,
            visible.end(query),
            indices,
            count};
  }
};

template <typename Input>
struct MlaRows;

// The arguments of one call, with dense rows and validated values. Tensors that the
// call lacks are undefined.
class MlaInputs {
 public:
  explicit MlaInputs(const SparseFlashMla& op) : MlaInputs(op, op.pages) {}
  explicit MlaInputs(const SparseFlashMlaGrad& op) : MlaInputs(op, SparseMlaPages{}) {}

  // The sequences with all joined keys of each.
  std::vector<Sequence> joined_sequences() const;
  // Zeroes the tokens that belong to no sequence, in dense outputs of queries and of keys.
  void zero_unused(std::initializer_list<at::Tensor> of_query, const at::Tensor& of_originals = {},
                   const at::Tensor& of_compressed = {}) const;

  static constexpr bool value_is_key() { return true; }

  // The rows of every sequence.
  template <typename Input>
  std::vector<MlaRows<Input>> by_sequence() const {
    std::vector<MlaRows<Input>> result;
    for (const auto& sequence : sequences) {
      result.emplace_back(*this, sequence);
    }
    return result;
  }

  std::vector<MlaSequence> sequences;
  BlockTable ori_table, cmp_table;
  at::Tensor query, ori_kv, cmp_kv, indices, sink;
  int64_t heads, size;
  static constexpr int64_t rope_size = 0;

 private:
  template <typename Op>
  MlaInputs(const Op& op, const SparseMlaPages& pages);

  void check_blocks(std::string_view op) const;
};

// The same for one sequence, with tokens counted from its first.
template <typename Input>
struct MlaRows {
  using Element = Input;

  MlaRows(const MlaInputs& inputs, const MlaSequence& of)
      : sequence(of),
        query(inputs.query, of.originals.query_begin),
        key({inputs.ori_kv, inputs.ori_table, of.originals},
            {inputs.cmp_kv, inputs.cmp_table, of.compressed}, of.originals.keys),
        value(key),
        indices(inputs.indices, of.originals.query_begin),
        selects(inputs.indices.defined()),
        count(selects ? inputs.indices.size(-1) : 0) {}

  // The row of a token in outputs.
  int64_t row(int64_t token) const { return sequence.originals.query_begin + token; }
  JoinedKeys selected(int64_t token) const {
    return sequence.keys_of(token, selects ? indices.row(token) : nullptr, count);
  }

  MlaSequence sequence;
  TokenRows<Input> query, query_rope;
  JoinedKeyRows<Input> key, key_rope, value;
  TokenRows<int32_t> indices;
  bool selects;
  int64_t count;
};

}  // namespace ascend_attn::cpu
