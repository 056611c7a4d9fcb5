// Multiplies a few query tokens at a time with tiles of keys that are packed once for all of them,
// and selects the top k of a row as soon as its block of rows is complete.
#include "ops/lightning_indexer.h"

#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "core/sequence_lengths.h"
#include "core/sparse_mode.h"
#include "cpu/common/indexer.h"
#include "cpu/common/parallel_tasks.h"
#include "cpu/common/sparse_inputs.h"
#include "cpu/common/tile_gemm.h"
#include "cpu/common/token_rows.h"
#include "cpu/common/top_k.h"
#include "dispatch/operator.h"

namespace ascend_attn::cpu {
namespace {

constexpr int64_t kKeyTile = 128;
// Tokens of a block share the packed keys, and their scores are in memory together.
constexpr int64_t kTokens = 64;
constexpr int64_t kScoreBytes = 1 << 24;

// A few query tokens of one sequence.
template <typename Input>
struct TokenBlock {
  const SequenceInputs<Input>* inputs;
  int64_t begin;
  int64_t tokens;
  int64_t cost = 0;

  int64_t visible(int64_t slot) const { return inputs->visible.end(begin + slot); }
  // The keys that some token sees: in both modes the last one sees the most.
  int64_t keys() const { return visible(tokens - 1); }
  // Its first row in the outputs.
  int64_t row() const { return inputs->row(begin); }
};

// scores[s] = sum over heads of weights[h] * relu(logits[h][s])
template <typename Sum>
void weighted_relu(const Tile<Sum>& logits, const Sum* weights, int64_t heads, Sum* scores) {
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
        load_row(block.inputs->query.row(block.begin + slot, h), query_.row(slot * heads_ + h),
                 size_);
      }
      weights.load(block.row() + slot, weights_.row(slot));
    }
  }

  // Computes the scores (tokens, keys) of the tile of keys that starts at `key`.
  void score(const TokenBlock<Input>& block, int64_t key, const Tile<Sum>& scores) {
    const int64_t count = std::min(kKeyTile, block.keys() - key);
    for (int64_t i = 0; i < count; ++i) {
      load_row(block.inputs->key.row(key + i), rows_.row(i), size_);
    }
    zero_rows(rows_, count, kKeyTile);
    pack_transposed(depth_, kKeyTile, rows_, packed_.data());
    for (int64_t slot = 0; slot < block.tokens; ++slot) {
      if (key < block.visible(slot)) {
        tile_gemm({heads_, kKeyTile, depth_, query_.from(slot * heads_), packed_, logits_, false});
        weighted_relu(logits_, weights_.row(slot), heads_, scores.row(slot) + key);
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
            const LightningIndexer::Outputs& outputs) {
  const auto& [indices, values] = outputs;
  const int64_t count = indices.size(-1);
  const int64_t row = (block.row() + slot) * count;
  auto* best = indices.mutable_data_ptr<int32_t>() + row;
  const int64_t kept = top_k(scores.row(slot), block.visible(slot), count, best);
  if (values.numel() > 0) {
    // Scores of compressed keys are not rounded to the dtype of query.
    if (values.scalar_type() == at::CppTypeToScalarType<Sum>::value) {
      store_values<Sum>(scores.row(slot), best, kept, values, row);
    } else {
      store_values<Input>(scores.row(slot), best, kept, values, row);
    }
  }
}

template <typename Input, typename Operand>
void compute(const LightningIndexer& op, const SparseInputs& inputs,
             const LightningIndexer::Outputs& outputs) {
  using Sum = Accumulator<Operand>;
  const int64_t heads = inputs.heads;
  const int64_t size = inputs.size;
  const HeadWeights<Input> weights(op.weights);
  const int64_t max_keys = round_up(longest(inputs.sequences, &Sequence::keys), kKeyTile);
  const int64_t most_tokens = std::clamp<int64_t>(
      kScoreBytes / static_cast<int64_t>(sizeof(Sum)) / std::max<int64_t>(max_keys, 1), 1,
      std::min(kTokens, std::max<int64_t>(longest(inputs.sequences, &Sequence::queries), 1)));

  const std::vector<SequenceInputs<Input>> sequences = inputs.by_sequence<Input>();
  std::vector<TokenBlock<Input>> blocks;
  for (const auto& sequence : sequences) {
    const int64_t queries = sequence.sequence.queries;
    for (int64_t begin = 0; begin < queries; begin += most_tokens) {
      auto& block = blocks.emplace_back(&sequence, begin, std::min(most_tokens, queries - begin));
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
        select(block, slot, worker.scores, worker.top_k, outputs);
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
        select(block, slot, scores, top_k, outputs);
      }
    });
  }
}

void lightning_indexer(const LightningIndexer& op, LightningIndexer::Outputs& outputs) {
  const SparseInputs inputs(op);
  std::get<0>(outputs).fill_(-1);
  std::get<1>(outputs).fill_(-std::numeric_limits<double>::infinity());
  dispatch_operand(op.query.scalar_type(), [&]<typename Input, typename Operand>() {
    compute<Input, Operand>(op, inputs, outputs);
  });
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) { register_kernel<LightningIndexer, lightning_indexer>(m); }

}  // namespace
}  // namespace ascend_attn::cpu

void ascend_attn::LightningIndexer::check_values() const {
  const cpu::SparseInputs checked(*this);
  // A pack of several sequences with paged keys and without a query that has any: the NPU's kernel
  // writes behind its outputs. Keys side by side are launched so that it does not.
  if (compressed() || !pages.given() || layout != Layout::TND || checked.sequences.size() < 2) {
    return;
  }
  check_value(!std::ranges::all_of(checked.sequences, &Sequence::empty), name,
              "actual_seq_lengths_key",
              "expected a sequence that has queries and keys, without which the NPU's kernel "
              "writes out of bounds, got none among ",
              checked.sequences.size());
}
