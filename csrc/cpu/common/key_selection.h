// Selects the keys of an indexer. Multiplies a few query tokens at a time with tiles of keys that
// are packed once for all of them, and selects the top k of a row as soon as its block of rows is
// complete.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/sequence_lengths.h"
#include "core/sparse_mode.h"
#include "cpu/common/indexer.h"
#include "cpu/common/key_rows.h"
#include "cpu/common/parallel_tasks.h"
#include "cpu/common/sparse_inputs.h"
#include "cpu/common/tile_gemm.h"
#include "cpu/common/token_rows.h"
#include "cpu/common/top_k.h"
#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

inline constexpr int64_t kKeyTile = 128;
// Tokens of a block share the packed keys, and their scores are in memory together.
inline constexpr int64_t kTokens = 64;
inline constexpr int64_t kScoreBytes = 1 << 24;

// Factors of the scores of a sequence's keys: key's sizes with a last axis of 1, in float16 or in
// float32.
class KeyFactors {
 public:
  KeyFactors(const at::Tensor& factors, const BlockTable& table, const Sequence& sequence) {
    if (factors.scalar_type() == at::kHalf) {
      half_.emplace(factors, table, sequence);
    } else {
      single_.emplace(factors, table, sequence);
    }
  }
  // Reads those of up to kKeyTile keys from `key` on.
  template <typename T>
  void load(int64_t key, int64_t count, T* to) const {
    half_ ? load_from(*half_, key, count, to) : load_from(*single_, key, count, to);
  }

 private:
  template <typename Factor, typename T>
  static void load_from(const KeyRows<Factor>& rows, int64_t key, int64_t count, T* to) {
    std::array<Factor, kKeyTile> factors;
    for (int64_t i = 0; i < count; ++i) {
      factors[static_cast<size_t>(i)] = *rows.row(key + i);
    }
    load_row(factors.data(), to, count);
  }

  std::optional<KeyRows<at::Half>> half_;
  std::optional<KeyRows<float>> single_;
};

// A few query tokens of one sequence.
template <typename Input>
struct TokenBlock {
  const SequenceInputs<Input>* inputs;
  const KeyFactors* factors;  // null where keys have none
  int64_t begin;
  int64_t tokens;
  int64_t cost = 0;

  int64_t visible(int64_t slot) const { return inputs->visible.end(begin + slot); }
  // The keys that some token sees: in both modes the last one sees the most.
  int64_t keys() const { return visible(tokens - 1); }
  // Its first row in the outputs.
  int64_t row() const { return inputs->row(begin); }
};

// An int8 is exact in bfloat16: the upper half of its float32. Compilers vectorise no other way.
template <typename Operand, typename Input>
void load_operands(const Input* from, Operand* to, int64_t size) {
  if constexpr (std::is_same_v<Input, int8_t> && std::is_same_v<Operand, at::BFloat16>) {
    vectorized([=] {
      for (int64_t i = 0; i < size; ++i) {
        const auto bits = std::bit_cast<uint32_t>(static_cast<float>(from[i]));
        to[i] = at::BFloat16(static_cast<uint16_t>(bits >> 16), at::BFloat16::from_bits());
      }
    });
  } else {
    load_row(from, to, size);
  }
}

// scores[s] = factors[s] * sum over heads of weights[h] * relu(logits[h][s]); null factors are 1.
template <typename Sum>
void weighted_relu(const Tile<Sum>& logits, const Sum* weights, int64_t heads, const Sum* factors,
                   Sum* scores) {
  vectorized([=, rows = logits.data(), stride = logits.stride()] {
    for (int64_t s = 0; s < kKeyTile; ++s) {
      scores[s] = 0;
    }
    for (int64_t h = 0; h < heads; ++h) {
      const Sum weight = weights[h];
      const Sum* row = rows + h * stride;
      for (int64_t s = 0; s < kKeyTile; ++s) {
        scores[s] += weight * relu(row[s]);
      }
    }
    if (factors != nullptr) {
      for (int64_t s = 0; s < kKeyTile; ++s) {
        scores[s] *= factors[s];
      }
    }
  });
}

template <typename Input, typename Operand>
class Scorer {
 public:
  using Sum = Accumulator<Operand>;

  // A block has up to `tokens` tokens.
  Scorer(int64_t tokens, int64_t heads, int64_t size)
      : tokens_(tokens), heads_(heads), size_(size) {}

  void load(const TokenBlock<Input>& block, const HeadWeights<Input>& weights) {
    for (int64_t slot = 0; slot < block.tokens; ++slot) {
      for (int64_t h = 0; h < heads_; ++h) {
        load_operands(block.inputs->query.row(block.begin + slot, h), query_.row(slot * heads_ + h),
                      size_);
      }
      weights.load(block.row() + slot, weights_.row(slot));
    }
  }

  // Computes the scores (tokens, keys) of the tile of keys that starts at `key`.
  void score(const TokenBlock<Input>& block, int64_t key, const Tile<Sum>& scores) {
    const int64_t count = std::min(kKeyTile, block.keys() - key);
    for (int64_t i = 0; i < count; ++i) {
      load_operands(block.inputs->key.row(key + i), rows_.row(i), size_);
    }
    zero_rows(rows_, count, kKeyTile);
    pack_transposed(depth_, kKeyTile, rows_, packed_.data());
    if (block.factors) {
      block.factors->load(key, count, factors_.row(0));
    }
    for (int64_t slot = 0; slot < block.tokens; ++slot) {
      if (key < block.visible(slot)) {
        tile_gemm({heads_, kKeyTile, depth_, query_.from(slot * heads_), packed_, logits_, false});
        weighted_relu(logits_, weights_.row(slot), heads_,
                      block.factors ? factors_.row(0) : nullptr, scores.row(slot) + key);
      }
    }
  }

 private:
  int64_t tokens_, heads_, size_;
  int64_t depth_ = round_up(size_, depth_step<Operand>);
  Tile<Operand> query_{tokens_ * heads_, depth_};
  Tile<Sum> weights_{tokens_, heads_};
  Tile<Operand> rows_{kKeyTile, depth_};
  Tile<Operand> packed_{depth_, kKeyTile};
  Tile<Sum> logits_{heads_, kKeyTile};
  Tile<Sum> factors_{1, kKeyTile};
};

template <typename Value, typename Sum>
void store_values(const Sum* scores, const int32_t* best, int64_t kept, const at::Tensor& values,
                  int64_t row) {
  auto* value = values.mutable_data_ptr<Value>() + row;
  for (int64_t i = 0; i < kept; ++i) {
    value[i] = static_cast<Value>(scores[best[i]]);
  }
}

// Writes the best keys of a token of a block.
template <typename Input, typename Sum>
void select(const TokenBlock<Input>& block, int64_t slot, const Tile<Sum>& scores, TopK<Sum>& top_k,
            const at::Tensor& indices, const at::Tensor& values) {
  const int64_t count = indices.size(-1);
  const int64_t row = (block.row() + slot) * count;
  auto* best = indices.mutable_data_ptr<int32_t>() + row;
  const int64_t kept = top_k(scores.row(slot), block.visible(slot), count, best);
  if (values.defined() && values.numel() > 0) {
    // Scores of compressed keys are not rounded to the dtype of query.
    if (values.scalar_type() == at::CppTypeToScalarType<Sum>::value) {
      store_values<Sum>(scores.row(slot), best, kept, values, row);
    } else {
      store_values<Input>(scores.row(slot), best, kept, values, row);
    }
  }
}

// Writes the best keys of every query token to `indices`, and their scores to `values` unless it is
// undefined or empty. `key_factors`, for KeyFactors, may be undefined.
template <typename Input, typename Operand>
void select_keys(const SparseInputs& inputs, const HeadWeights<Input>& weights,
                 const at::Tensor& key_factors, const at::Tensor& indices,
                 const at::Tensor& values) {
  using Sum = Accumulator<Operand>;
  const int64_t heads = inputs.heads;
  const int64_t size = inputs.size;
  const int64_t max_keys = round_up(longest(inputs.sequences, &Sequence::keys), kKeyTile);
  const int64_t most_tokens = std::clamp<int64_t>(
      kScoreBytes / static_cast<int64_t>(sizeof(Sum)) / std::max<int64_t>(max_keys, 1), 1,
      std::min(kTokens, std::max<int64_t>(longest(inputs.sequences, &Sequence::queries), 1)));

  const std::vector<SequenceInputs<Input>> sequences = inputs.by_sequence<Input>();
  std::vector<KeyFactors> factors;
  for (const auto& sequence : inputs.sequences) {
    if (key_factors.defined()) {
      factors.emplace_back(key_factors, inputs.block_table, sequence);
    }
  }
  std::vector<TokenBlock<Input>> blocks;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const int64_t queries = sequences[i].sequence.queries;
    for (int64_t begin = 0; begin < queries; begin += most_tokens) {
      auto& block = blocks.emplace_back(&sequences[i], factors.empty() ? nullptr : &factors[i],
                                        begin, std::min(most_tokens, queries - begin));
      block.cost = block.keys() * block.tokens;
    }
  }

  if (enough_tasks(static_cast<int64_t>(blocks.size()))) {
    struct Worker {
      Scorer<Input, Operand> scorer;
      Tile<Sum> scores;
      TopK<Sum> top_k;
    };
    const auto make_worker = [&] {
      return std::make_unique<Worker>(
          Worker{{most_tokens, heads, size}, {most_tokens, max_keys}, TopK<Sum>(max_keys)});
    };
    for_each_task(std::move(blocks), make_worker, [&](Worker& worker, const auto& block) {
      worker.scorer.load(block, weights);
      for (int64_t tile = 0; tile < block.keys(); tile += kKeyTile) {
        worker.scorer.score(block, tile, worker.scores);
      }
      for (int64_t slot = 0; slot < block.tokens; ++slot) {
        select(block, slot, worker.scores, worker.top_k, indices, values);
      }
    });
    return;
  }
  // A few tokens, as when decoding: the threads share the keys of each block.
  for (const auto& block : blocks) {
    const Tile<Sum> scores(block.tokens, max_keys);
    const int64_t tiles = (block.keys() + kKeyTile - 1) / kKeyTile;
    const int64_t workers = worker_count(tiles);
    for_each_worker(workers, [&](int64_t worker) {
      Scorer<Input, Operand> scorer(block.tokens, heads, size);
      scorer.load(block, weights);
      for (int64_t tile = worker; tile < tiles; tile += workers) {
        scorer.score(block, tile * kKeyTile, scores);
      }
    });
    const int64_t selecting = worker_count(block.tokens);
    for_each_worker(selecting, [&](int64_t worker) {
      TopK<Sum> top_k(block.keys());
      for (int64_t slot = worker; slot < block.tokens; slot += selecting) {
        select(block, slot, scores, top_k, indices, values);
      }
    });
  }
}

}  // namespace ascend_attn::cpu
