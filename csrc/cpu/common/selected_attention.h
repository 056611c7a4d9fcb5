// Online softmax over tiles of the keys that a token selects: its scores are never all in memory.
#pragma once

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/common/partial_attention.h"
#include "cpu/common/query_key_product.h"
#include "cpu/common/sparse_inputs.h"
#include "cpu/common/tile_gemm.h"
#include "cpu/common/value_tile.h"
#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

inline constexpr int64_t kSelectedPartKeys = 512;  // see attend_to_parts

// A task of attend_to_parts. `Rows` has the inputs of one sequence, as SequenceInputs.
template <typename Rows>
struct SelectingToken {
  const Rows* sequence;
  int64_t token;
  int64_t cost;       // in blocks of keys
  int64_t first_row;  // of the outputs, (tokens * heads, D)
  int64_t first_head;
  int64_t heads;

  int64_t parts() const { return sequence->selected(token).parts(kSelectedPartKeys); }
  int64_t rows() const { return heads; }
};

// The tokens of a call. Few of them are divided by their heads as well, all equally, so that every
// thread has work; each group of heads reads the keys of its token.
template <typename Rows>
class SelectingTokens {
 public:
  explicit SelectingTokens(int64_t heads) : heads_(heads) {}

  void add(const Rows& sequence, int64_t token, int64_t cost) {
    tokens_.push_back({&sequence, token, cost, sequence.row(token) * heads_, 0, heads_});
  }

  std::vector<SelectingToken<Rows>> divided() && {
    const int64_t enough = 2 * at::get_num_threads();
    int64_t parts = 0;
    for (size_t i = 0; i < tokens_.size() && parts < enough; ++i) {
      parts += tokens_[i].parts();
    }
    int64_t groups = 1;
    while (parts * groups < enough && heads_ % (2 * groups) == 0 &&
           heads_ / (2 * groups) >= kLeastHeads) {
      groups *= 2;
    }
    const size_t tokens = tokens_.size();
    for (auto& token : tokens_) {
      token.heads = heads_ / groups;
    }
    for (int64_t group = 1; group < groups; ++group) {
      for (size_t i = 0; i < tokens; ++i) {
        auto token = tokens_[i];
        token.first_head = group * token.heads;
        token.first_row += token.first_head;
        tokens_.push_back(token);
      }
    }
    return std::move(tokens_);
  }

 private:
  static constexpr int64_t kLeastHeads = 32;  // fewer take longer to load keys than to multiply

  int64_t heads_;
  std::vector<SelectingToken<Rows>> tokens_;
};

template <typename Rows, typename Operand>
class SelectedAttention {
 public:
  using Input = typename Rows::Element;
  using Token = SelectingToken<Rows>;
  using T = Accumulator<Operand>;

  // Every token has `heads` heads.
  template <typename Inputs>
  SelectedAttention(const Inputs& inputs, int64_t heads, double scale)
      : heads_(heads),
        size_(inputs.size),
        rope_size_(inputs.rope_size),
        scale_(static_cast<T>(scale)),
        value_tile_(inputs.value_is_key(), kMaxKeys, inputs.size) {}

  void load(const Token& token) {
    const auto& rows = *token.sequence;
    product_.load_query(rows.query.from_head(token.first_head),
                        rows.query_rope.from_head(token.first_head), token.token, heads_);
  }

  // Computes a part of the token that was loaded, and sets the number of its keys.
  void part(const Token& token, int64_t index, Partial<T>& result) {
    auto selected = token.sequence->selected(token.token).part(index, kSelectedPartKeys);
    // Not -inf, which would make NaN of tiles whose scores are all -inf.
    std::fill_n(result.max, padded_heads_, std::numeric_limits<T>::lowest());
    std::fill_n(result.sum, padded_heads_, T(0));
    std::array<int64_t, kMaxKeys> positions;
    while (const int64_t count = selected.next(positions.data(), kMaxKeys)) {
      add_keys(*token.sequence, positions.data(), count, result);
      result.keys += count;
    }
  }

  // As many as a product needs of its depth.
  static int64_t padded_heads(int64_t heads) { return round_up(heads, depth_step<Operand>); }

 private:
  static constexpr int64_t kMaxKeys = 128;  // per tile: keys and values stay in the L2 cache

  void add_keys(const Rows& inputs, const int64_t* positions, int64_t count,
                const Partial<T>& result) {
    const bool first = result.keys == 0;
    const int64_t tile_rows = product_.load_keys(inputs.key, inputs.key_rope, positions, count);
    product_.multiply(tile_rows, scores_);
    if (update_softmax(count, result.max, result.sum) && !first) {
      for (int64_t h = 0; h < heads_; ++h) {
        T* out = result.out + h * size_;
        scale(out, factor_.data()[h], out, size_);
      }
    }
    const auto& values =
        value_tile_.load(inputs.value, product_.keys(), positions, count, tile_rows);
    zero_rows(by_key_, count, tile_rows);
    transpose(by_key_, tile_rows, padded_heads_, probabilities_);
    tile_gemm({padded_heads_,
               size_,
               tile_rows,
               probabilities_,
               operand_b(tile_rows, size_, values, packed_values_),
               {result.out, size_},
               !first});
  }

  // Computes exp(scores - max) with the running maximum. Returns whether the maximum rose for some
  // head; earlier results must then be rescaled by factor_.
  bool update_softmax(int64_t count, T* max, T* sum) {
    bool rose = false;
    vectorized([&rose, count, heads = padded_heads_, scale = scale_, scores = scores_.data(),
                by_key = by_key_.data(), max, sum, factor = factor_.data()] {
      for (int64_t h = 0; h < heads; ++h) {
        factor[h] = max[h];
      }
      for (int64_t i = 0; i < count; ++i) {
        T* row = scores + i * heads;
        for (int64_t h = 0; h < heads; ++h) {
          row[h] *= scale;
          max[h] = row[h] > max[h] ? row[h] : max[h];
        }
      }
      int32_t changed = 0;
      for (int64_t h = 0; h < heads; ++h) {
        changed |= factor[h] != max[h];
        factor[h] = softmax_weight(factor[h], max[h]);
        sum[h] *= factor[h];
      }
      for (int64_t i = 0; i < count; ++i) {
#pragma omp simd
        for (int64_t h = 0; h < heads; ++h) {
          const T e = softmax_weight(scores[i * heads + h], max[h]);
          sum[h] += e;
          by_key[i * heads + h] = round_to<Operand>(e);
        }
      }
      rose = changed != 0;
    });
    return rose;
  }

  int64_t heads_, size_, rope_size_;
  int64_t padded_heads_ = padded_heads(heads_);
  T scale_;
  QueryKeyProduct<Input, Operand> product_{padded_heads_, {size_, rope_size_}, kMaxKeys};
  ValueTile<Operand> value_tile_;
  Tile<Operand> packed_values_{depth_step<Operand> > 1 ? kMaxKeys : 0, size_, TileContent::unset};
  Tile<T> scores_{kMaxKeys, padded_heads_, TileContent::unset};
  Tile<Operand> by_key_{kMaxKeys, padded_heads_, TileContent::unset};  // exp(score - max)
  // The same, transposed.
  Tile<Operand> probabilities_{padded_heads_, kMaxKeys, TileContent::unset};
  Tile<T> factor_{1, padded_heads_};
};

// Computes the attention of every token over the keys that it selects. Empty statistics are left
// out.
template <typename Rows, typename Operand>
void attend_to_selected_keys(const SparseInputs& inputs, double scale, const at::Tensor& out,
                             const at::Tensor& softmax_max, const at::Tensor& softmax_sum) {
  using Input = typename Rows::Element;
  using T = Accumulator<Operand>;
  const auto sequences = inputs.by_sequence<Input, Rows>();
  SelectingTokens<Rows> all_tokens(inputs.heads);
  for (const auto& sequence : sequences) {
    for (int64_t token = 0; token < sequence.sequence.queries; ++token) {
      const int64_t blocks = blocks_of(sequence.visible.end(token), inputs.block_size);
      all_tokens.add(sequence, token, std::min(sequence.count, blocks));
    }
  }
  auto tokens = std::move(all_tokens).divided();
  const int64_t heads = tokens.empty() ? 0 : tokens[0].heads;
  auto* out_data = out.template mutable_data_ptr<Input>();
  const auto statistics_of = [](const at::Tensor& statistics, int64_t row) {
    return statistics.numel() > 0 ? statistics.mutable_data_ptr<T>() + row : nullptr;
  };
  using Worker = SelectedAttention<Rows, Operand>;
  attend_to_parts<T>(
      std::move(tokens), {Worker::padded_heads(heads), inputs.size},
      [&] { return std::make_unique<Worker>(inputs, heads, scale); },
      [&](const SelectingToken<Rows>& token, const Partial<T>& result, int64_t begin, int64_t end) {
        const int64_t row = token.first_row;
        const TokenOutputs<Input, T> to{out_data + row * inputs.size,
                                        statistics_of(softmax_max, row),
                                        statistics_of(softmax_sum, row)};
        to.store(result, begin, end, inputs.size);
      });
}

}  // namespace ascend_attn::cpu
