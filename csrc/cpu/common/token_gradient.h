// The gradient of the attention of one query token, from tiles of the keys that it selects. The
// probabilities are recomputed from the softmax statistics of the forward operator.
#pragma once

#include <array>

#include "cpu/common/query_key_product.h"
#include "cpu/common/tile_gemm.h"
#include "cpu/common/token_rows.h"
#include "cpu/common/value_tile.h"
#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

// `Rows` has the inputs of one sequence, as SequenceInputs.
template <typename Rows, typename Operand>
class TokenGradient {
 public:
  using Input = typename Rows::Element;
  using T = Accumulator<Operand>;

  static constexpr int64_t kMaxKeys = 64;  // per tile, so that its products stay in the L2 cache

  template <typename Inputs>
  TokenGradient(const Inputs& inputs, T scale)
      : heads_(inputs.heads),
        columns_{inputs.size, inputs.rope_size},
        scale_(scale),
        value_tile_(inputs.value_is_key(), kMaxKeys, inputs.size) {}

  // The exponentials exp(score - max) are multiplied by inverse_sum. `d_lse`: the gradients of the
  // log-sum-exp, or null.
  void load_token(const Rows& inputs, const TokenRows<Input>& d_out, const TokenRows<Input>& out,
                  int64_t token, const T* softmax_max, const T* inverse_sum,
                  const T* d_lse = nullptr) {
    product_.load_query(inputs.query, inputs.query_rope, token, heads_);
    load_heads(d_out, token, heads_, columns_.nope, d_out_);
    pack_transposed(columns_.rope_begin(), padded_heads_, d_out_, packed_d_out_transposed_.data());
    d_out_operand_ = operand_b(padded_heads_, columns_.nope, d_out_, packed_d_out_);
    query_operand_ = operand_b(padded_heads_, columns_.width(), product_.query(), packed_query_);
    for (int64_t h = 0; h < heads_; ++h) {
      max()[h] = softmax_max[h];
      this->inverse_sum()[h] = inverse_sum[h];
      delta()[h] = dot(d_out.row(token, h), out.row(token, h), columns_.nope);
      delta()[h] -= d_lse != nullptr ? d_lse[h] : T(0);
    }
  }

  // Sets the probabilities and the gradients of the scores for a tile of keys. Returns the number
  // of its rows.
  int64_t differentiate(const Rows& inputs, const int64_t* positions, int64_t count) {
    const int64_t rows = product_.load_keys(inputs.key, inputs.key_rope, positions, count);
    const auto& values = value_tile_.load(inputs.value, product_.keys(), positions, count, rows);
    product_.multiply(rows, scores_);
    tile_gemm({rows, padded_heads_, columns_.rope_begin(), values, packed_d_out_transposed_,
               d_probabilities_, false});
    differentiate_softmax(count);
    return rows;
  }

  // The products of the gradients of keys, by key: P^T d_out, and dS^T query without the scale.
  void multiply_d_out(int64_t rows, const Tile<T>& to, bool add = false) const {
    tile_gemm({rows, columns_.nope, padded_heads_, probabilities_, d_out_operand_, to, add});
  }
  void multiply_query(int64_t rows, const Tile<T>& to) const {
    tile_gemm({rows, columns_.width(), padded_heads_, d_scores_, query_operand_, to, false});
  }

  // Adds the tile's part of the gradient of the query, without the scale.
  void add_to_query(int64_t count, int64_t rows, bool first) {
    zero_rows(d_scores_, count, rows);
    transpose(d_scores_, rows, padded_heads_, d_scores_by_head_);
    tile_gemm({padded_heads_, columns_.width(), rows, d_scores_by_head_,
               operand_b(rows, columns_.width(), product_.keys(), packed_keys_), d_query_, !first});
  }
  void store_query(Input* d_query, Input* d_query_rope) const {
    store_heads(d_query_, 0, heads_, columns_.nope, scale_, d_query);
    store_heads(d_query_, columns_.rope_begin(), heads_, columns_.rope, scale_, d_query_rope);
  }

  // The weights of differentiate() and their gradients, (keys, heads), before they are rounded.
  const Tile<T>& weights() const { return scores_; }
  const Tile<T>& d_weights() const { return d_probabilities_; }

  int64_t heads() const { return heads_; }
  const HeadColumns<Operand>& columns() const { return columns_; }
  T scale() const { return scale_; }

 private:
  // P = exp(scale * scores - max) / sum and dS = P * (dP - delta), both as operands. They stay 0
  // for the heads of padding, whose scores an infinite key makes NaN.
  void differentiate_softmax(int64_t count) {
    vectorized([count, heads = heads_, stride = padded_heads_, scale = scale_,
                scores = scores_.data(), d_probabilities = d_probabilities_.data(),
                probabilities = probabilities_.data(), d_scores = d_scores_.data(), max = max(),
                inverse_sum = inverse_sum(), delta = delta()] {
      for (int64_t i = 0; i < count; ++i) {
        // Compilers do not test at run time whether so many pointers overlap.
#pragma omp simd
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t at = i * stride + h;
          const T p = softmax_weight(rounded_product(scores[at], scale), max[h]) * inverse_sum[h];
          scores[at] = p;
          probabilities[at] = round_to<Operand>(p);
          d_scores[at] = round_to<Operand>(p * (d_probabilities[at] - delta[h]));
        }
      }
    });
  }

  T* max() const { return statistics_.row(0); }
  T* inverse_sum() const { return statistics_.row(1); }
  T* delta() const { return statistics_.row(2); }

  int64_t heads_;
  int64_t padded_heads_ = round_up(heads_, depth_step<Operand>);
  HeadColumns<Operand> columns_;
  T scale_;
  QueryKeyProduct<Input, Operand> product_{padded_heads_, columns_, kMaxKeys};
  Tile<Operand> packed_query_{padded_heads_, columns_.width()};
  Tile<Operand> packed_keys_{kMaxKeys, columns_.width()};
  ValueTile<Operand> value_tile_;
  Tile<Operand> d_out_{padded_heads_, columns_.rope_begin()};
  Tile<Operand> packed_d_out_{padded_heads_, columns_.rope_begin()};
  Tile<Operand> packed_d_out_transposed_{columns_.rope_begin(), padded_heads_};
  Matrix<const Operand> d_out_operand_;
  Matrix<const Operand> query_operand_;
  Tile<T> scores_{kMaxKeys, padded_heads_};
  Tile<T> d_probabilities_{kMaxKeys, padded_heads_};
  Tile<Operand> probabilities_{kMaxKeys, padded_heads_};
  Tile<Operand> d_scores_{kMaxKeys, padded_heads_};
  Tile<Operand> d_scores_by_head_{padded_heads_, kMaxKeys};
  Tile<T> d_query_{padded_heads_, columns_.width()};
  Tile<T> statistics_{3, padded_heads_};
};

}  // namespace ascend_attn::cpu
