// The values of a tile of keys.
#pragma once

#include "cpu/common/tile_gemm.h"
#include "cpu/common/token_rows.h"

namespace ascend_attn::cpu {

// The tile of values that belongs to a tile of keys; the same tile if value is key.
template <typename Operand>
class ValueTile {
 public:
  ValueTile(bool value_is_key, int64_t max_keys, int64_t size)
      : size_(size), values_(value_is_key ? 0 : max_keys, round_up(size, depth_step<Operand>)) {}

  template <typename Rows>
  const Tile<Operand>& load(const Rows& value, const Tile<Operand>& keys, const int64_t* positions,
                            int64_t count, int64_t tile_rows) const {
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
