// Tiles of the score matrix of one key head: blocks of rows by blocks of keys. A row is one query
// of one query head. Rows are ordered with the heads of the group innermost, so that a block holds
// neighbouring queries, for which the mask keeps nearly the same keys.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "cpu/common/dense_attention.h"
#include "cpu/common/tile_gemm.h"
#include "cpu/common/token_rows.h"

namespace ascend_attn::cpu {

inline constexpr int64_t kRowBlock = 64;
inline constexpr int64_t kKeyBlock = 512;
// The sizes of products are rounded up to these steps, because code is generated for every new
// size.
inline constexpr int64_t kRowStep = 16;
inline constexpr int64_t kKeyStep = 64;

// The rows of a product for so many rows: a power of two below kRowStep, because decoding has few.
constexpr int64_t product_rows(int64_t rows) {
  return rows < kRowStep ? static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)))
                         : round_up(rows, kRowStep);
}

// The columns of a tile: [begin, end) covers the keys that any row keeps, [row_begin, row_end)
// those that each row keeps. Columns are counted from the first key of the block.
struct TileColumns {
  TileColumns(const DenseSequence& sequence, int64_t group, int64_t first_row, int64_t rows,
              int64_t key_begin, int64_t keys) {
    const auto column = [&](int64_t key) { return std::clamp<int64_t>(key - key_begin, 0, keys); };
    const auto& kept = sequence.kept;
    begin = column(kept.begin(first_row / group)) / kKeyStep * kKeyStep;
    end = round_up(column(kept.end((first_row + rows - 1) / group)), kKeyStep);
    if (empty()) {
      return;
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t query = (first_row + r) / group;
      row_begin[r] = static_cast<int32_t>(column(kept.begin(query)));
      row_end[r] = static_cast<int32_t>(std::max<int64_t>(column(kept.end(query)), row_begin[r]));
    }
  }

  bool empty() const { return begin >= end; }
  int64_t width() const { return end - begin; }

  int64_t begin;
  int64_t end;
  std::array<int32_t, kRowBlock> row_begin;
  std::array<int32_t, kRowBlock> row_end;
};

// Calls function(begin, count) for the blocks of keys [first, last): cut at multiples of kKeyBlock,
// and begun at one of kKeyStep. So the tiles of a row, and its bits, do not depend on the rows that
// share the blocks.
template <typename Function>
void for_each_key_block(int64_t first, int64_t last, const Function& function) {
  for (int64_t begin = first / kKeyStep * kKeyStep; begin < last;) {
    const int64_t end = std::min(last, round_up(begin + 1, kKeyBlock));
    function(begin, end - begin);
    begin = end;
  }
}

// Copies rows of `columns` elements into `tile` and zeroes the rows after them, up to a multiple of
// kRowStep. The remaining columns of the tile are zero already.
template <typename Operand, typename Input>
void load_rows(const HeadRows<const Input>& rows, int64_t group, int64_t first, int64_t count,
               int64_t columns, const Tile<Operand>& tile, int64_t at = 0) {
  for (int64_t r = 0; r < count; ++r) {
    load_row(rows.row((first + r) / group, (first + r) % group), tile.row(at + r), columns);
  }
  zero_rows(tile, at + count, at + round_up(count, kRowStep));
}

// A block of keys, or of values, as an operand of products.
template <typename Operand>
class KeyTile {
 public:
  KeyTile(int64_t size, bool by_rows, bool transposed)
      : size_(round_up(size, depth_step<Operand>)),
        columns_(size),
        rows_(kKeyBlock, size_),
        packed_(by_rows && depth_step<Operand> > 1 ? kKeyBlock : 0, size_),
        transposed_(transposed ? kKeyBlock : 0, size_) {}

  template <typename Input>
  void load(const HeadRows<const Input>& rows, int64_t first, int64_t count) {
    const auto source = dense_rows(rows, first, count);
    const int64_t padded = round_up(count, kKeyStep);
    by_rows_ = source;
    if (packed_.data() != nullptr) {
      by_rows_ = operand_b(padded, size_, source.data, source.stride, packed_.data());
    }
    if (transposed_.data() != nullptr) {
      width_ = padded;
      pack_transposed(size_, width_, source.data, source.stride, transposed_.data());
    }
  }

  // Returns operand B (keys, size), starting at key `begin`, a multiple of depth_step.
  OperandB<Operand> by_rows(int64_t begin) const {
    return {by_rows_.data + begin * by_rows_.stride, by_rows_.stride};
  }
  // Returns operand B (size, keys), starting at key `begin`.
  OperandB<Operand> transposed(int64_t begin) const {
    return {transposed_.data() + begin * depth_step<Operand>, width_};
  }
  // A multiple of depth_step, as every product requires of its depth.
  int64_t size() const { return size_; }

 private:
  template <typename Input>
  OperandB<Operand> dense_rows(const HeadRows<const Input>& rows, int64_t first, int64_t count) {
    if constexpr (std::is_same_v<Operand, Input> && depth_step<Operand> > 1) {
      // Packed rows are read in place, unless they need zero padding.
      if (count % kKeyStep == 0 && size_ == columns_) {
        return {rows.row(first), rows.token_stride()};
      }
    }
    for (int64_t r = 0; r < count; ++r) {
      load_row(rows.row(first + r), rows_.row(r), columns_);
    }
    zero_rows(rows_, count, round_up(count, kKeyStep));
    return {rows_.data(), rows_.stride()};
  }

  int64_t size_;
  int64_t columns_;
  int64_t width_ = 0;
  Tile<Operand> rows_;
  Tile<Operand> packed_;
  Tile<Operand> transposed_;
  OperandB<Operand> by_rows_{};
};

// Calls function(head, query, row of the tile) for each of `rows` rows that keeps a key of the
// tile. Rows are numbered query * group + head within the group.
template <typename Function>
void for_each_kept_row(const TileColumns& columns, int64_t first_row, int64_t rows,
                       int64_t first_head, int64_t group, const Function& function) {
  for (int64_t r = 0; r < rows; ++r) {
    if (columns.row_begin[r] < columns.row_end[r]) {
      function(first_head + (first_row + r) % group, (first_row + r) / group, r);
    }
  }
}

}  // namespace ascend_attn::cpu
