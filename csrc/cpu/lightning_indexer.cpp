// Multiplies a few query tokens at a time with tiles of keys that are packed once for all of them,
// and selects the top k of a row as soon as its block of rows is complete.
#include "ops/lightning_indexer.h"

#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "core/operator.h"
#include "core/sequence_lengths.h"
#include "core/sparse_mode.h"
#include "cpu/common/indexer.h"
#include "cpu/common/parallel_scatter_add.h"
#include "cpu/common/sparse_indices.h"
#include "cpu/common/tile_gemm.h"
#include "cpu/common/token_rows.h"
#include "cpu/common/top_k.h"

namespace ascend_attn::cpu {
namespace {

constexpr int64_t kKeyTile = 128;

// All keys of a sequence, packed as one operand B per tile.
template <typename Input, typename Operand>
class PackedKeys {
 public:
  PackedKeys(int64_t max_keys, int64_t size)
      : size_(size),
        depth_(round_up(size, depth_step<Operand>)),
        packed_(round_up(max_keys, kKeyTile), depth_) {}

  void pack(const TokenRows<Input>& key, int64_t keys) {
    at::parallel_for(0, (keys + kKeyTile - 1) / kKeyTile, 1, [&](int64_t begin, int64_t end) {
      const Tile<Operand> rows(kKeyTile, depth_);
      for (int64_t tile = begin; tile < end; ++tile) {
        const int64_t first = tile * kKeyTile;
        const int64_t count = std::min(kKeyTile, keys - first);
        for (int64_t i = 0; i < count; ++i) {
          load_row(key.row(first + i), rows.row(i), size_);
        }
        zero_rows(rows, count, kKeyTile);
        pack_transposed(depth_, kKeyTile, rows.data(), rows.stride(), packed_.row(first));
      }
    });
  }

  int64_t depth() const { return depth_; }
  const Operand* tile_of(int64_t key) const { return packed_.row(key); }

 private:
  int64_t size_;
  int64_t depth_;
  Tile<Operand> packed_;
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

  // Scores up to `tokens` query tokens at a time.
  Scorer(int64_t tokens, int64_t heads, int64_t size, int64_t max_keys)
      : heads_(heads),
        size_(size),
        query_(tokens * heads, round_up(size, depth_step<Operand>)),
        weights_(tokens, heads),
        logits_(heads, kKeyTile),
        scores_(tokens, round_up(max_keys, kKeyTile)) {}

  void load(int64_t slot, const TokenRows<Input>& query, const HeadWeights<Input>& weights,
            int64_t token, int64_t row) {
    for (int64_t h = 0; h < heads_; ++h) {
      load_row(query.row(token, h), query_.row(slot * heads_ + h), size_);
    }
    weights.load(row, weights_.row(slot));
  }

  // Computes the scores of the tile of keys that starts at `key`.
  void score(int64_t slot, const PackedKeys<Input, Operand>& keys, int64_t key) {
    tile_gemm(heads_, kKeyTile, keys.depth(), query_.row(slot * heads_), query_.stride(),
              keys.tile_of(key), kKeyTile, logits_.data(), kKeyTile, false);
    weighted_relu(logits_, weights_.row(slot), heads_, scores_.row(slot) + key);
  }

  const Sum* scores(int64_t slot) const { return scores_.row(slot); }

 private:
  int64_t heads_;
  int64_t size_;
  Tile<Operand> query_;
  Tile<Sum> weights_;
  Tile<Sum> logits_;
  Tile<Sum> scores_;
};

template <typename Input, typename Operand>
void compute(const LightningIndexer& op, LightningIndexer::Outputs& outputs) {
  using Sum = Accumulator<Operand>;
  // Not structured bindings: Clang 16 cannot capture those where OpenMP is enabled.
  auto& indices = std::get<0>(outputs);
  auto& values = std::get<1>(outputs);
  indices.fill_(-1);
  values.fill_(-std::numeric_limits<double>::infinity());

  const auto query = with_dense_rows(op.query);
  const auto key = with_dense_rows(op.key);
  const int64_t heads = query.size(-2);
  const int64_t size = query.size(-1);
  const int64_t count = indices.size(-1);
  const HeadWeights<Input> weights(op.weights);
  const auto sequences = sequences_of(op);
  const int64_t max_keys = longest(sequences, &Sequence::keys);

  // The scores of a block of tokens stay in cache until the best ones are selected.
  constexpr int64_t score_bytes = 1 << 20;
  const int64_t block = std::clamp<int64_t>(
      score_bytes / static_cast<int64_t>(sizeof(Sum)) / std::max<int64_t>(max_keys, 1), 1, 16);

  PackedKeys<Input, Operand> keys(max_keys, size);
  for (const auto& sequence : sequences) {
    keys.pack(TokenRows<Input>(key, sequence.key_begin), sequence.keys);
    const TokenRows<Input> queries(query, sequence.query_begin);
    const auto visible = visible_keys_of(op, sequence);
    const int64_t blocks = (sequence.queries + block - 1) / block;
    const int64_t workers = worker_count(blocks);
    for_each_worker(workers, [&](int64_t worker) {
      Scorer<Input, Operand> scorer(block, heads, size, sequence.keys);
      TopK<Sum> top_k(sequence.keys);
      for (int64_t begin = worker * block; begin < sequence.queries; begin += workers * block) {
        const int64_t tokens = std::min(block, sequence.queries - begin);
        for (int64_t slot = 0; slot < tokens; ++slot) {
          scorer.load(slot, queries, weights, begin + slot, sequence.query_begin + begin + slot);
        }
        // In both modes the last token of a block sees the most keys.
        const int64_t end = visible.end(begin + tokens - 1);
        for (int64_t tile = 0; tile < end; tile += kKeyTile) {
          for (int64_t slot = 0; slot < tokens; ++slot) {
            if (tile < visible.end(begin + slot)) {
              scorer.score(slot, keys, tile);
            }
          }
        }
        for (int64_t slot = 0; slot < tokens; ++slot) {
          const int64_t row = (sequence.query_begin + begin + slot) * count;
          const Sum* scores = scorer.scores(slot);
          auto* best = indices.template mutable_data_ptr<int32_t>() + row;
          const int64_t kept = top_k(scores, visible.end(begin + slot), count, best);
          if (op.return_values) {
            auto* value = values.template mutable_data_ptr<Input>() + row;
            for (int64_t i = 0; i < kept; ++i) {
              value[i] = static_cast<Input>(scores[best[i]]);
            }
          }
        }
      }
    });
  }
}

void lightning_indexer(const LightningIndexer& op, LightningIndexer::Outputs& outputs) {
  dispatch_operand(op.query.scalar_type(), [&]<typename Input, typename Operand>() {
    compute<Input, Operand>(op, outputs);
  });
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) { register_kernel<LightningIndexer, lightning_indexer>(m); }

}  // namespace
}  // namespace ascend_attn::cpu
