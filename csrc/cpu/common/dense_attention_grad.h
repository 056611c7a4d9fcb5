// The gradient of one tile of scores, recomputed from the softmax statistics of the forward
// operator.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>
#include <string_view>

#include "cpu/common/attention_scores.h"
#include "cpu/common/attention_tiles.h"
#include "cpu/common/dense_attention.h"
#include "cpu/common/few_rows.h"
#include "cpu/common/softmax_statistics.h"
#include "cpu/common/tile_gemm.h"
#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

// The arguments of the gradient operators, viewed by head in every layout.
struct DenseAttentionGrad {
  template <typename Op>
  explicit DenseAttentionGrad(const Op& arguments)
      : forward(arguments),
        d_out(forward.by_head(
            with_dense_rows(arguments.dy ? *arguments.dy : at::zeros_like(arguments.attention_in)),
            forward.heads)),
        out(forward.by_head(with_dense_rows(arguments.attention_in), forward.heads)),
        softmax_max(arguments.softmax_max.contiguous()),
        softmax_sum(arguments.softmax_sum.contiguous()) {
    int64_t rows = 0;
    for (const auto& sequence : forward.sequences) {
      rows += sequence.query_room * forward.heads;
    }
    check_statistics(Op::name, softmax_max, softmax_sum, rows, kStatisticsLanes);
    if (arguments.d_softmax_sum) {
      // Nothing flows through rows without keys, whose sum is FLT_MAX.
      const auto sum = softmax_sum.select(-1, 0);
      const auto in_use = sum.masked_fill(sum == std::numeric_limits<float>::max(), 0);
      d_lse = arguments.d_softmax_sum->sum(-1).mul(in_use).contiguous();
    }
  }

  DenseAttention forward;
  at::Tensor d_out, out;
  at::Tensor softmax_max, softmax_sum;
  at::Tensor d_lse;  // of each row; undefined if nothing flows into the statistics
};

template <typename Input, typename Operand>
class ScoreGradient {
 public:
  using T = Accumulator<Operand>;

  explicit ScoreGradient(const DenseAttentionGrad& attention) : grad_(attention) {}

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
      if (grad_.d_lse.defined()) {
        delta()[row] -= grad_.d_lse.const_data_ptr<T>()[at / kStatisticsLanes];
      }
    }
  }

  // Adds the gradients of the group's sinks to `sums`. A sink has the score of a key without a
  // value, so that its P * dP is 0.
  void add_sink_gradients(double* sums) const {
    const int64_t group = attention_.group();
    const T* sinks = attention_.sink.const_data_ptr<T>() + first_head();
    for (int64_t row = 0; row < sequence_->queries * group; ++row) {
      const int64_t head = row % group;
      const T weight = softmax_weight(sinks[head], max()[row]) * inverse_sum()[row];
      sums[head] -= static_cast<double>(weight) * static_cast<double>(delta()[row]);
    }
  }

  // Loads rows [first, first + rows) into query() and d_out().
  void load_queries(int64_t first, int64_t rows) {
    const int64_t group = attention_.group();
    load_rows(joined_query_rows<Input>(attention_, *sequence_, first_head()), group, first, rows,
              query_);
    load_rows(query_rows<Input>(grad_.d_out, *sequence_, first_head()), group, first, rows,
              attention_.value_size, d_out_);
  }

  // Calls function(tile) for the tiles of keys [begin, begin + count), with P after dropout in
  // probabilities() and the gradient of the scores in d_scores(). Both are 0 where a row does not
  // keep the key.
  template <typename Function>
  void for_each_tile(int64_t begin, int64_t count, const Function& function) {
    keys_.load(HeadKeys<Input>::keys(attention_, *sequence_, key_head_).rows(0), begin, count);
    values_.load(key_rows<Input>(attention_.value, *sequence_, key_head_), begin, count);
    cpu::for_each_tile(*sequence_, attention_.group(), 0, sequence_->queries * attention_.group(),
                       begin, count, [&](const ScoreTile& tile) {
                         differentiate(tile);
                         function(tile);
                       });
  }

  int64_t first_head() const { return key_head_ * attention_.group(); }
  const Tile<Operand>& query() const { return query_; }
  const Tile<Operand>& d_out() const { return d_out_; }
  const Tile<T>& probabilities() const { return scores_; }
  const Tile<T>& d_scores() const { return d_scores_; }
  const KeyTile<Operand>& keys() const { return keys_; }
  const KeyTile<Operand>& values() const { return values_; }

 private:
  void differentiate(const ScoreTile& tile) {
    load_queries(tile.first_row, tile.rows);
    multiply_keys(tile);
    multiply(d_out_, values_, tile, d_scores_);
    scores_of_.finish(tile, first_head(), scores_);
    scores_of_.multiply_weights(tile, first_head(), d_scores_);
    differentiate_softmax(tile);
    scores_of_.multiply_weights(tile, first_head(), scores_);
  }

  // As the forward operator, which must have the same bits.
  void multiply_keys(const ScoreTile& tile) {
    if (attention_.in_place(*sequence_)) {
      const int64_t count =
          *std::max_element(tile.row_end.begin(), tile.row_end.begin() + tile.rows);
      const int64_t size = attention_.size;
      const auto query = in_order_of_keys<Input, Operand>(query_, tile.rows, size, ordered_query_);
      const auto keys = in_order_of_keys<Input, Operand>(keys_.rows(), count, size, ordered_keys_);
      score_rows<T, Operand>({1, tile.rows, count}, query, size, rows_of(keys), {count, count},
                             scores_);
    } else {
      multiply(query_, keys_, tile, scores_);
    }
  }

  static void multiply(const Tile<Operand>& rows, const KeyTile<Operand>& keys,
                       const ScoreTile& tile, const Tile<T>& products) {
    tile_gemm({round_up(tile.rows, kRowStep), tile.width(), keys.size(), rows,
               keys.transposed(tile.begin), products.from(0, tile.begin), false});
  }

  // P = exp(scores - max) / sum and dS = P * (dP - delta), in place.
  void differentiate_softmax(const ScoreTile& columns) {
    const int64_t first = columns.first_row;
    vectorized([rows = columns.rows, scale = scores_of_.factor(), scores = scores_.data(),
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
          const T score = rounded_product(s[j], scale);
          // A key that is masked out has no part in a row whose maximum is NaN.
          s[j] = score == kExcluded ? T(0) : softmax_weight(score, row_max) * factor;
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
  const DenseAttention& attention_ = grad_.forward;
  AttentionScores<Input, T> scores_of_{attention_};
  const DenseSequence* sequence_ = nullptr;
  int64_t key_head_ = 0;
  KeyTile<Operand> keys_{attention_.size, /*by_rows=*/true, /*transposed=*/true};
  KeyTile<Operand> values_{attention_.value_size, /*by_rows=*/false, /*transposed=*/true};
  Tile<Operand> query_{kRowBlock, keys_.size()};
  Tile<Operand> ordered_query_{kChangesOrder<Input, Operand> ? kRowBlock : 0, keys_.size(),
                               TileContent::unset};
  Tile<Operand> ordered_keys_{kChangesOrder<Input, Operand> ? kKeyBlock : 0, keys_.size(),
                              TileContent::unset};
  Tile<Operand> d_out_{kRowBlock, values_.size()};
  Tile<T> scores_{kRowBlock, kKeyBlock};
  Tile<T> d_scores_{kRowBlock, kKeyBlock};
  Tile<T> statistics_;
};

}  // namespace ascend_attn::cpu
