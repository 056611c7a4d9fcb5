// The keys that sparse_indices selects.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/sequence_lengths.h"

namespace ascend_attn::cpu {

template <typename Sequences>
std::vector<int64_t> keys_of(const Sequences& sequences) {
  std::vector<int64_t> keys;
  for (const auto& sequence : sequences) {
    keys.push_back(sequence.keys);
  }
  return keys;
}

// Which keys a selection may name.
enum class Selectable {
  all_keys,  // in BSND those behind the length of the batch too, which SelectedKeys passes over
  keys_of_sequence
};

// Returns the number of blocks that hold `keys` keys.
inline int64_t blocks_of(int64_t keys, int64_t block_size) {
  return keys / block_size + (keys % block_size != 0);
}

// Iterates over the keys that one row of sparse_indices selects, in order and with repetitions, a
// chunk at a time.
class SelectedKeys {
 public:
  // `row` has `count` block indices; keys from `visible` on are not selected.
  SelectedKeys(const int32_t* row, int64_t count, int64_t block_size, int64_t visible)
      : block_(row),
        end_(row + std::min(count, blocks_of(visible, block_size))),
        block_size_(block_size),
        visible_(visible) {
    end_ = std::find(block_, end_, -1);
  }

  // Writes the next positions, counted within the sequence, and returns how many: 0 at the end.
  int64_t next(int64_t* positions, int64_t capacity) {
    int64_t written = 0;
    while (block_ != end_ && written < capacity) {
      const int64_t begin = int64_t{*block_} * block_size_;
      const int64_t end = begin + std::min(block_size_, visible_ - begin);
      const int64_t position = begin + offset_;
      const int64_t count = std::clamp<int64_t>(end - position, 0, capacity - written);
      for (int64_t i = 0; i < count; ++i) {
        positions[written + i] = position + i;
      }
      written += count;
      offset_ += count;
      if (position + count >= end) {
        ++block_;
        offset_ = 0;
      }
    }
    return written;
  }

  // The selected blocks are divided into parts of as many, which hold `keys` keys or, where a block
  // is larger, one block.
  int64_t parts(int64_t keys) const { return blocks_of(end_ - block_, part_blocks(keys)); }
  SelectedKeys part(int64_t index, int64_t keys) const {
    auto result = *this;
    result.block_ += index * part_blocks(keys);
    result.end_ = result.block_ + std::min<int64_t>(part_blocks(keys), end_ - result.block_);
    return result;
  }

 private:
  int64_t part_blocks(int64_t keys) const { return std::max<int64_t>(keys / block_size_, 1); }

  const int32_t* block_;
  const int32_t* end_;
  int64_t block_size_;
  int64_t visible_;
  int64_t offset_ = 0;  // within the current block
};

}  // namespace ascend_attn::cpu
