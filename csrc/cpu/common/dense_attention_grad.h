// The gradient of one tile of scores, recomputed from the softmax statistics of the forward
// operator.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <limits>

#include "cpu/common/attention_scores.h"
#include "cpu/common/attention_tiles.h"
#include "cpu/common/dense_attention.h"
#include "cpu/common/tile_gemm.h"
#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

// The arguments of the gradient operators, viewed by head in every layout.
struct DenseAttentionGrad {
  template <typename Op>
  explicit DenseAttentionGrad(const Op& arguments)
      : forward(arguments),
        d_out(forward.by_head(with_dense_rows(arguments.dy), forward.heads)),
        out(forward.by_head(with_dense_rows(arguments.attention_in), forward.heads)),
        softmax_max(arguments.softmax_max.contiguous()),
        softmax_sum(arguments.softmax_sum.contiguous()) {}

  DenseAttention forward;
  at::Tensor d_out, out;
  at::Tensor softmax_max, softmax_sum;
};

template <typename Input, typename Operand>
class ScoreGradient {
 public:
  using T = Accumulator<Operand>;

  explicit ScoreGradient(const DenseAttentionGrad& attention)
      : grad_(attention),
        attention_(attention.forward),
        scores_of_(attention_),
        keys_(attention_.size, /*by_rows=*/true, /*transposed=*/true),
        values_(attention_.value_size, /*by_rows=*/false, /*transposed=*/true),
        query_(kRowBlock, keys_.size()),
        d_out_(kRowBlock, values_.size()),
        scores_(kRowBlock, kKeyBlock),
        d_scores_(kRowBlock, kKeyBlock) {}

  // Selects the head and reads its statistics.
  void start(const DenseSequence& sequence, int64_t key_head) {
    sequence_ = &sequence;
    key_head_ = key_head;
    const int64_t group = attention_.group();
    const int64_t rows = sequence.queries * group;
    statistics_ = Tile<T>(3, rows);
    const auto d_out = query_rows<Input>(grad_.d_out, sequence, first_head());
    const auto out = query_rows<Input>(grad_.out, sequence, first_head());
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t query = row / group;
      const int64_t head = row % group;
      const int64_t at =
          kStatisticsLanes * attention_.statistics_row(sequence, first_head() + head, query);
      max()[row] = grad_.softmax_max.const_data_ptr<T>()[at];
      inverse_sum()[row] = T(1) / grad_.softmax_sum.const_data_ptr<T>()[at];
      delta()[row] = dot(d_out.row(query, head), out.row(query, head), attention_.value_size);
    }
  }

  void load_keys(int64_t begin, int64_t count) {
    key_begin_ = begin;
    keys_.load(key_rows<Input>(attention_.key, *sequence_, key_head_), begin, count);
    values_.load(key_rows<Input>(attention_.value, *sequence_, key_head_), begin, count);
  }

  // Loads rows [first, first + rows) into query() and d_out().
  void load_queries(int64_t first, int64_t rows) {
    const int64_t group = attention_.group();
    load_rows(query_rows<Input>(attention_.query, *sequence_, first_head()), group, first, rows,
              attention_.size, query_);
    load_rows(query_rows<Input>(grad_.d_out, *sequence_, first_head()), group, first, rows,
              attention_.value_size, d_out_);
  }

  // Computes P after dropout in probabilities() and the gradient of the scores in d_scores(), for
  // rows [first, first + rows) and the loaded keys. Both are 0 where a row does not keep the key.
  void run(int64_t first, int64_t rows, const TileColumns& columns) {
    load_queries(first, rows);
    multiply(query_, keys_, rows, columns, scores_);
    multiply(d_out_, values_, rows, columns, d_scores_);
    for_each_row(first, rows, columns, [&](int64_t head, int64_t query, int64_t r) {
      if (scores_of_.has_terms()) {
        scores_of_.finish(*sequence_, head, query, key_begin_ + columns.row_begin[r],
                          key_begin_ + columns.row_end[r], scores_.row(r) + columns.row_begin[r]);
      }
      if (scores_of_.has_dropout()) {
        scores_of_.drop(*sequence_, head, query, key_begin_ + columns.row_begin[r],
                        key_begin_ + columns.row_end[r], d_scores_.row(r) + columns.row_begin[r]);
      }
    });
    differentiate_softmax(first, rows, columns);
    if (scores_of_.has_dropout()) {
      for_each_row(first, rows, columns, [&](int64_t head, int64_t query, int64_t r) {
        scores_of_.drop(*sequence_, head, query, key_begin_ + columns.row_begin[r],
                        key_begin_ + columns.row_end[r], scores_.row(r) + columns.row_begin[r]);
      });
    }
  }

  // Calls function(head, query, row of the tile) for the rows that keep some key of the tile.
  template <typename Function>
  void for_each_row(int64_t first, int64_t rows, const TileColumns& columns,
                    const Function& function) const {
    for_each_kept_row(columns, first, rows, first_head(), attention_.group(), function);
  }

  const Tile<Operand>& query() const { return query_; }
  const Tile<Operand>& d_out() const { return d_out_; }
  const Tile<T>& probabilities() const { return scores_; }
  const Tile<T>& d_scores() const { return d_scores_; }
  const KeyTile<Operand>& keys() const { return keys_; }
  const KeyTile<Operand>& values() const { return values_; }

 private:
  int64_t first_head() const { return key_head_ * attention_.group(); }

  static void multiply(const Tile<Operand>& rows, const KeyTile<Operand>& keys, int64_t count,
                       const TileColumns& columns, const Tile<T>& products) {
    const auto operand = keys.transposed(columns.begin);
    tile_gemm(round_up(count, kRowStep), columns.width(), keys.size(), rows.data(), rows.stride(),
              operand.data, operand.stride, products.data() + columns.begin, products.stride(),
              /*accumulate=*/false);
  }

  // P = exp(scores - max) / sum and dS = P * (dP - delta), in place.
  void differentiate_softmax(int64_t first, int64_t rows, const TileColumns& columns) {
    vectorized([rows, scale = scores_of_.factor(), scores = scores_.data(),
                d_scores = d_scores_.data(), &columns, max = max() + first,
                inverse_sum = inverse_sum() + first, delta = delta() + first] {
      constexpr T kExcluded = -std::numeric_limits<T>::infinity();
      for (int64_t r = 0; r < rows; ++r) {
        T* s = scores + r * kKeyBlock;
        T* d = d_scores + r * kKeyBlock;
        const int64_t begin = columns.row_begin[r];
        const int64_t end = columns.row_end[r];
        const T row_max = max[r];
        const T factor = inverse_sum[r];
        const T row_delta = delta[r];
        for (int64_t j = columns.begin; j < begin; ++j) {
          s[j] = d[j] = 0;
        }
#pragma omp simd
        for (int64_t j = begin; j < end; ++j) {
          const T score = s[j] * scale;
          // A key that is masked out has no part in a row whose maximum is NaN.
          s[j] = score == kExcluded ? T(0) : exponential(score - row_max) * factor;
          d[j] = s[j] * (d[j] - row_delta);
        }
        for (int64_t j = end; j < columns.end; ++j) {
          s[j] = d[j] = 0;
        }
      }
      // The rows of padding: of zeros, whose product with an infinite key is NaN.
      for (int64_t r = rows; r < round_up(rows, kRowStep); ++r) {
        std::fill(scores + r * kKeyBlock + columns.begin, scores + r * kKeyBlock + columns.end, 0);
        std::fill(d_scores + r * kKeyBlock + columns.begin, d_scores + r * kKeyBlock + columns.end,
                  0);
      }
    });
  }

  T* max() const { return statistics_.row(0); }
  T* inverse_sum() const { return statistics_.row(1); }
  T* delta() const { return statistics_.row(2); }

  const DenseAttentionGrad& grad_;
  const DenseAttention& attention_;
  AttentionScores<Input, T> scores_of_;
  const DenseSequence* sequence_ = nullptr;
  int64_t key_head_ = 0;
  int64_t key_begin_ = 0;
  KeyTile<Operand> keys_;
  KeyTile<Operand> values_;
  Tile<Operand> query_;
  Tile<Operand> d_out_;
  Tile<T> scores_;
  Tile<T> d_scores_;
  Tile<T> statistics_;
};

}  // namespace ascend_attn::cpu
