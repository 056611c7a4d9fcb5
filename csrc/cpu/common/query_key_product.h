// Scores of one query token against a tile of selected keys.
#pragma once

#include "cpu/common/tile_gemm.h"
#include "cpu/common/token_rows.h"

namespace ascend_attn::cpu {

// The number of keys in a tile is rounded up to this with zero rows, because code is generated for
// every new size.
inline constexpr int64_t kTileStep = 16;

// The columns of a row with a rope part: `nope` columns, then the rope's, each padded to a depth
// that tile_gemm accepts.
template <typename Operand>
struct HeadColumns {
  int64_t nope;
  int64_t rope;

  int64_t rope_begin() const { return round_up(nope, depth_step<Operand>); }
  int64_t width() const { return rope_begin() + round_up(rope, depth_step<Operand>); }
  // For tiles whose padding stays as it is.
  TileContent content() const {
    return nope + rope == width() ? TileContent::unset : TileContent::zeros;
  }
};

// Computes scores as keys * query^T, (keys, heads): the gathered keys are used as they are, the
// query is packed once for all its keys, and the softmax loops run along the heads.
template <typename Input, typename Operand>
class QueryKeyProduct {
 public:
  // `heads` is a multiple of depth_step; heads that the query does not have stay zero.
  QueryKeyProduct(int64_t heads, HeadColumns<Operand> columns, int64_t max_keys)
      : heads_(heads), columns_(columns), max_keys_(max_keys) {}

  void load_query(const HeadRows<const Input>& query, const HeadRows<const Input>& rope,
                  int64_t token, int64_t heads) {
    load_heads(query, token, heads, columns_.nope, query_);
    if (columns_.rope > 0) {
      load_heads(rope, token, heads, columns_.rope, query_, columns_.rope_begin());
    }
    pack_transposed(columns_.width(), heads_, query_, packed_query_.data());
  }

  // Returns the number of rows in the tile: `count` and the zero rows after them.
  template <typename Rows, typename Position, typename RopeRows = Rows>
  int64_t load_keys(const Rows& key, const RopeRows& rope, const Position* positions,
                    int64_t count) {
    const int64_t rows = round_up(count, kTileStep);
    gather_rows(key, positions, count, columns_.nope, keys_);
    if (columns_.rope > 0) {
      gather_rows(rope, positions, count, columns_.rope, keys_, columns_.rope_begin());
    }
    zero_rows(keys_, count, rows);
    return rows;
  }

  // scores (rows, heads) = keys * query^T
  void multiply(int64_t rows, const Tile<Accumulator<Operand>>& scores) const {
    tile_gemm({rows, heads_, columns_.width(), keys_, packed_query_, scores, false});
  }

  const Tile<Operand>& query() const { return query_; }
  const Tile<Operand>& keys() const { return keys_; }

 private:
  int64_t heads_;
  HeadColumns<Operand> columns_;
  int64_t max_keys_;
  Tile<Operand> query_{heads_, columns_.width()};
  Tile<Operand> packed_query_{columns_.width(), heads_, TileContent::unset};
  Tile<Operand> keys_{max_keys_, columns_.width(), columns_.content()};
};

}  // namespace ascend_attn::cpu
