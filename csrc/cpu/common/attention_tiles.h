// Tiles of the score matrix of one key head: blocks of rows by blocks of keys. A row is one query
// of one query head. Rows are ordered with the heads of the group innermost, so that a block holds
// neighbouring queries, for which the mask keeps nearly the same keys.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
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

// A tile: `rows` rows of a sequence from `first_row` on, and a block of keys from `key_begin` on.
// Columns are counted from there: [begin, end) covers the keys that any row keeps, [row_begin,
// row_end) those that each row keeps.
struct ScoreTile {
  ScoreTile(const DenseSequence& sequence, int64_t group, int64_t first_row, int64_t rows,
            int64_t key_begin, int64_t keys)
      : sequence(sequence), group(group), first_row(first_row), rows(rows), key_begin(key_begin) {
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

  // Calls function(head, query, row of the tile) for each row that keeps a key of the tile. Rows
  // are numbered query * group + head within the group, whose first head is `first_head`.
  template <typename Function>
  void for_each_kept_row(int64_t first_head, const Function& function) const {
    for (int64_t r = 0; r < rows; ++r) {
      if (row_begin[r] < row_end[r]) {
        function(first_head + (first_row + r) % group, (first_row + r) / group, r);
      }
    }
  }

  const DenseSequence& sequence;
  int64_t group, first_row, rows, key_begin;
  int64_t begin, end;
  std::array<int32_t, kRowBlock> row_begin, row_end;
};

// Calls function(tile) for the tiles of rows [first_row, first_row + rows) and a block of keys in
// which some row keeps some key.
template <typename Function>
void for_each_tile(const DenseSequence& sequence, int64_t group, int64_t first_row, int64_t rows,
                   int64_t key_begin, int64_t keys, const Function& function) {
  for (int64_t row = 0; row < rows; row += kRowBlock) {
    const ScoreTile tile(sequence, group, first_row + row, std::min(kRowBlock, rows - row),
                         key_begin, keys);
    if (!tile.empty()) {
      function(tile);
    }
  }
}

// Returns columns [begin, end) of the first `rows` rows of a tile as operand A, in `rounded` where
// they need rounding.
template <typename T, typename Operand>
Matrix<const Operand> as_operand(const Tile<T>& tile, int64_t rows, const ScoreTile& columns,
                                 const Tile<Operand>& rounded) {
  if constexpr (std::is_same_v<Operand, T>) {
    return tile.from(0, columns.begin);
  } else {
    for (int64_t r = 0; r < rows; ++r) {
      convert(tile.row(r) + columns.begin, rounded.row(r) + columns.begin, columns.width());
    }
    return rounded.from(0, columns.begin);
  }
}

// Calls function(begin, count) for the blocks of keys [first, last): cut at multiples of `block`,
// and begun at one of kKeyStep. So the tiles of a row, and its bits, do not depend on the rows that
// share the blocks.
template <typename Function>
void for_each_key_block(int64_t first, int64_t last, int64_t block, const Function& function) {
  for (int64_t begin = first / kKeyStep * kKeyStep; begin < last;) {
    const int64_t end = std::min(last, round_up(begin + 1, block));
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
template <typename Operand, typename Input>
void load_rows(const JoinedRows<Input>& rows, int64_t group, int64_t first, int64_t count,
               const Tile<Operand>& tile, int64_t at = 0) {
  load_rows(rows.rows, group, first, count, rows.size, tile, at);
  for (int64_t r = 0; rows.ropes && r < count; ++r) {
    load_row(rows.ropes->row((first + r) / group, (first + r) % group),
             tile.row(at + r) + rows.size, rows.rope_size);
  }
}

// Copies rows [first, first + count), whose fractals are `stride` elements apart if they are not in
// one piece, to the rows of `to`.
template <typename Operand, typename Input>
void load_keys(const HeadRows<const Input>& rows, std::optional<int64_t> stride, int64_t first,
               int64_t count, int64_t columns, const Matrix<Operand>& to) {
  if (!stride) {
    for (int64_t r = 0; r < count; ++r) {
      load_row(rows.row(first + r), to.row(r), columns);
    }
    return;
  }
  vectorized([=, stride = *stride] {
    constexpr int64_t fractal = fractal_columns(sizeof(Input));
    for (int64_t r = 0; r < count; ++r) {
      const Input* from = rows.row(first + r);
      Operand* row = to.row(r);
      for (int64_t column = 0; column < columns; column += fractal) {
        if constexpr (std::is_same_v<Operand, Input>) {
          std::memcpy(row + column, from, fractal * sizeof(Input));
        } else {
          for (int64_t i = 0; i < fractal; ++i) {
            row[column + i] = round_to<Operand>(from[i]);
          }
        }
        from += stride;
      }
    }
  });
}

// A block of keys, or of values, as an operand of products.
template <typename Operand>
class KeyTile {
 public:
  // `keys` at most.
  KeyTile(int64_t size, bool by_rows, bool transposed, int64_t keys = kKeyBlock)
      : size_(round_up(size, depth_step<Operand>)),
        columns_(size),
        rows_(keys, size_),
        packed_(by_rows && depth_step<Operand> > 1 ? keys : 0, size_),
        transposed_(transposed ? keys : 0, size_) {}

  template <typename Input>
  void load(const HeadRows<const Input>& rows, int64_t first, int64_t count) {
    load(JoinedRows<Input>{rows, {}, columns_, 0}, first, count);
  }
  template <typename Input>
  void load(const JoinedRows<Input>& rows, int64_t first, int64_t count) {
    pack(dense_rows(rows, first, count), count);
  }
  template <typename Input>
  void load(const HeadKeys<Input>& keys, int64_t first, int64_t count) {
    pack(read(keys, first, count), count);
  }

  // Returns keys as rows, up to a multiple of kKeyStep, until others are read or loaded.
  template <typename Input>
  Matrix<const Operand> read(const HeadKeys<Input>& keys, int64_t first, int64_t count) const {
    const int64_t unread = std::clamp<int64_t>(keys.begin() - first, 0, count);
    if (unread == 0 && count <= keys.run(first)) {
      return dense_rows(keys.rows(first), 0, count);
    }
    zero_rows(rows_, 0, unread);
    for (int64_t at = unread; at < count;) {
      const int64_t run = std::min(count - at, keys.run(first + at));
      copy_rows(keys.rows(first + at), 0, run, at);
      at += run;
    }
    pad_rows(count);
    return rows_;
  }

  // Returns what was loaded, as read() does.
  Matrix<const Operand> rows() const { return source_; }
  // Returns operand B (keys, size), starting at key `begin`, a multiple of depth_step.
  Matrix<const Operand> by_rows(int64_t begin) const { return by_rows_.from(begin); }
  // Returns operand B (size, keys), starting at key `begin`.
  Matrix<const Operand> transposed(int64_t begin) const {
    return {transposed_.data() + begin * depth_step<Operand>, width_};
  }
  // A multiple of depth_step, as every product requires of its depth.
  int64_t size() const { return size_; }

 private:
  template <typename Input>
  Matrix<const Operand> dense_rows(const JoinedRows<Input>& rows, int64_t first,
                                   int64_t count) const {
    if constexpr (std::is_same_v<Operand, Input> && depth_step<Operand> > 1) {
      // Packed rows are read in place, unless they need zero padding.
      if (count % kKeyStep == 0 && size_ == rows.size && !rows.fractal_stride) {
        return {rows.rows.row(first), rows.rows.token_stride()};
      }
    }
    copy_rows(rows, first, count, 0);
    pad_rows(count);
    return rows_;
  }

  // Copies rows [first, first + count) to the tile's rows from `at` on.
  template <typename Input>
  void copy_rows(const JoinedRows<Input>& rows, int64_t first, int64_t count, int64_t at) const {
    load_keys(rows.rows, rows.fractal_stride, first, count, rows.size, rows_.from(at));
    if (rows.ropes) {
      load_keys(*rows.ropes, rows.rope_fractal_stride, first, count, rows.rope_size,
                rows_.from(at, rows.size));
    }
  }
  void pad_rows(int64_t count) const { zero_rows(rows_, count, round_up(count, kKeyStep)); }

  void pack(const Matrix<const Operand>& source, int64_t count) {
    width_ = round_up(count, kKeyStep);
    source_ = source;
    by_rows_ = packed_.data() != nullptr ? operand_b(width_, size_, source, packed_) : source;
    if (transposed_.data() != nullptr) {
      pack_transposed(size_, width_, source, transposed_.data());
    }
  }

  int64_t size_, columns_;
  int64_t width_ = 0;
  Tile<Operand> rows_, packed_, transposed_;
  Matrix<const Operand> source_, by_rows_;
};

}  // namespace ascend_attn::cpu
