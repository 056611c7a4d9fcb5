// Gradients of the indexer's scores over the selected keys. A score is the sum over heads of w * r
// with
//   S = q @ k^T,  r = relu(S)
// Given the gradient d of the scores:
//   dw = sum over keys of r * d;   dS = d * w * (S > 0);   dq = dS @ k;   dk = dS^T @ q
#pragma once

#include <cstdint>

#include "cpu/common/indexer.h"
#include "cpu/common/parallel_scatter_add.h"
#include "cpu/common/query_key_product.h"
#include "cpu/common/sparse_inputs.h"

namespace ascend_attn::cpu {

// Processes one query token at a time, and one tile of its keys at a time.
template <typename Input, typename Operand>
class IndexerGradient {
 public:
  using T = Accumulator<Operand>;
  static constexpr int64_t kMaxKeys = 128;  // in a tile

  IndexerGradient(int64_t heads, int64_t size) : heads_(heads), size_(size) {}

  // Allocates room for the logits S of a tile, (keys, heads).
  Tile<T> new_logits() const { return {kMaxKeys, padded_heads_}; }

  // `token` counts within the sequence, `row` over all tokens.
  void load_query(const TokenRows<Input>& query, const HeadWeights<Input>& weights, int64_t token,
                  int64_t row) {
    product_.load_query(query, {}, token, heads_);
    query_operand_ = operand_b(padded_heads_, size_, product_.query(), packed_query_);
    weights.load(row, weights_.data());
    zero_rows(d_weights_, 0, 1);
    zero_rows(d_query_, 0, padded_heads_);
  }

  void load_keys(const KeyRows<Input>& key, const int32_t* positions, int64_t count) {
    count_ = count;
    rows_ = product_.load_keys(key, {}, positions, count);
  }

  void logits(const Tile<T>& logits) const { product_.multiply(rows_, logits); }

  // Computes the scores (keys) of the tile.
  void scores(const Tile<T>& logits, T* scores) const {
    // Without the heads of padding, whose logits an infinite key makes NaN.
    vectorized([=, count = count_, heads = heads_, stride = padded_heads_, logits = logits.data(),
                weights = weights_.data()] {
      for (int64_t i = 0; i < count; ++i) {
        scores[i] = sum_of<T>(
            heads, [=, row = logits + i * stride](int64_t h) { return weights[h] * relu(row[h]); });
      }
    });
  }

  // Adds the gradients of the tile to those of the token and to rows of `d_keys`.
  void add(const Tile<T>& logits, const T* d_scores, RowSums<T>& d_keys, const int32_t* positions) {
    differentiate(logits, d_scores);
    zero_rows(d_logits_, count_, rows_);
    tile_gemm({rows_, size_, padded_heads_, d_logits_, query_operand_, d_key_, false});
    d_keys.add(positions, count_, d_key_, size_, 0);

    transpose(d_logits_, rows_, padded_heads_, d_logits_transposed_);
    tile_gemm({padded_heads_, size_, rows_, d_logits_transposed_,
               operand_b(rows_, size_, product_.keys(), packed_keys_), d_query_, true});
  }

  // Stores the gradients of the token in row `row` of the dense outputs.
  void store(int64_t row, const at::Tensor& d_query, const at::Tensor& d_weights) const {
    auto* query = d_query.mutable_data_ptr<Input>() + row * heads_ * size_;
    for (int64_t h = 0; h < heads_; ++h) {
      convert(d_query_.row(h), query + h * size_, size_);
    }
    if (d_weights.scalar_type() == at::kFloat) {
      convert(d_weights_.data(), d_weights.mutable_data_ptr<float>() + row * heads_, heads_);
    } else {
      convert(d_weights_.data(), d_weights.mutable_data_ptr<Input>() + row * heads_, heads_);
    }
  }

 private:
  void differentiate(const Tile<T>& logits, const T* d_scores) const {
    vectorized([=, count = count_, heads = padded_heads_, logits = logits.data(),
                weights = weights_.data(), d_weights = d_weights_.data(),
                d_logits = d_logits_.data()] {
      for (int64_t i = 0; i < count; ++i) {
        const T d_score = d_scores[i];
        const T* row = logits + i * heads;
        Operand* d_row = d_logits + i * heads;
#pragma omp simd
        for (int64_t h = 0; h < heads; ++h) {
          d_weights[h] += relu(row[h]) * d_score;
          const T d_logit = d_score * weights[h];
          d_row[h] = round_to<Operand>(row[h] > 0 ? d_logit : T(0));
        }
      }
    });
  }

  int64_t heads_;
  int64_t padded_heads_ = round_up(heads_, kTileStep);
  int64_t size_;
  int64_t count_ = 0;  // keys in the tile
  int64_t rows_ = 0;   // the same, rounded up
  QueryKeyProduct<Input, Operand> product_{padded_heads_, {size_, 0}, kMaxKeys};
  Matrix<const Operand> query_operand_;
  Tile<Operand> packed_query_{padded_heads_, size_};
  Tile<Operand> packed_keys_{kMaxKeys, size_};
  Tile<Operand> d_logits_{kMaxKeys, padded_heads_};             // (keys, heads)
  Tile<Operand> d_logits_transposed_{padded_heads_, kMaxKeys};  // (heads, keys)
  Tile<T> d_query_{padded_heads_, size_};
  Tile<T> d_key_{kMaxKeys, size_};
  Tile<T> weights_{1, padded_heads_};
  Tile<T> d_weights_{1, padded_heads_};
};

// Returns what stores the gradients of the sequence's keys.
template <typename Input>
auto key_gradient(const Sequence& sequence, const at::Tensor& d_key) {
  const int64_t size = d_key.size(-1);
  auto* rows = d_key.mutable_data_ptr<Input>() + sequence.key_begin * size;
  return [=](int64_t key, const auto* sum) { convert(sum, rows + key * size, size); };
}

}  // namespace ascend_attn::cpu
