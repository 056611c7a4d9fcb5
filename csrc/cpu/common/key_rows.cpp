#include "cpu/common/key_rows.h"

#include <algorithm>

#include "core/error.h"
#include "core/symbolic.h"
#include "cpu/common/sparse_indices.h"

namespace ascend_attn::cpu {

BlockTable::BlockTable(const KeyPages& pages, const at::Tensor& key) {
  if (pages.given()) {
    table_ = pages.block_table->contiguous();
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
  check_value(block >= 0 && block < num_blocks_, op, "block_table", "expected blocks in [0, ",
              num_blocks_, "), got ", block, " at (", sequence.batch, ", ", entry, ")");
}

void BlockTable::check_blocks(std::string_view op, const std::vector<Sequence>& sequences) const {
  for (const auto& sequence : sequences) {
    if (sequence.queries == 0 || complete(sequence)) {
      continue;
    }
    for (int64_t key = 0; key < sequence.keys; key += block_size_) {
      check_block(op, sequence, key);
    }
  }
}

}  // namespace ascend_attn::cpu
