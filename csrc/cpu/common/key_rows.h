// The rows of the keys of one sequence: one behind the other, or in the blocks of a cache.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "core/sequence_lengths.h"
#include "cpu/common/token_rows.h"
#include "ops/key_pages.h"

namespace ascend_attn::cpu {

// The block table of a call whose keys are paged; empty otherwise.
class BlockTable {
 public:
  BlockTable() = default;
  BlockTable(const KeyPages& pages, const at::Tensor& key,
             std::string_view argument = "block_table");

  bool given() const { return table_.defined(); }
  const int32_t* blocks(const Sequence& sequence) const {
    return table_.const_data_ptr<int32_t>() + sequence.batch * table_.size(1);
  }
  // Keys that a sequence has room for.
  int64_t capacity() const;
  // Whether the cache has every block of the sequence.
  bool complete(const Sequence& sequence) const;
  // Raises unless the cache has the block of this key.
  void check_block(std::string_view op, const Sequence& sequence, int64_t key) const;
  void warn_of_cumulative_counts(std::string_view op, const std::vector<Sequence>& sequences) const;

 private:
  std::string_view argument_;
  at::Tensor table_;
  int64_t num_blocks_ = 0;
  int64_t block_size_ = 0;
};

// Returns the sequences of a call whose keys may be paged.
inline std::vector<Sequence> read_sequences(std::string_view op, Layout layout,
                                            const at::Tensor& query, const at::Tensor& key,
                                            const KeyPages& pages, const Lengths& lengths_query,
                                            const Lengths& lengths_key,
                                            std::string_view key_lengths = kKeyLengths) {
  return pages.given()
             ? read_paged_sequences(op, layout, query, key, *pages.block_table, lengths_query,
                                    lengths_key, key_lengths)
             : read_sequences(op, layout, query, key, lengths_query, lengths_key, key_lengths);
}

template <typename T>
class KeyRows {
 public:
  KeyRows() = default;
  KeyRows(const at::Tensor& keys, const BlockTable& table, const Sequence& sequence)
      : rows_(keys, table.given() ? 0 : sequence.key_begin) {
    if (table.given() && keys.defined()) {
      blocks_ = table.blocks(sequence);
      block_size_ = static_cast<uint32_t>(keys.size(1));
      block_stride_ = keys.stride(0);
    }
  }

  // `key` counts from the first of the sequence.
  const T* row(int64_t key) const {
    if (blocks_ == nullptr) {
      return rows_.row(key);
    }
    // Lengths have 32 bits too, and dividing 32 bits is faster.
    const auto position = static_cast<uint32_t>(key);
    return rows_.row(position % block_size_) + blocks_[position / block_size_] * block_stride_;
  }

 private:
  TokenRows<T> rows_;  // of the first block, where there are blocks
  const int32_t* blocks_ = nullptr;
  uint32_t block_size_ = 1;
  int64_t block_stride_ = 0;
};

}  // namespace ascend_attn::cpu
