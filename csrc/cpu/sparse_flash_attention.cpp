// Online softmax over tiles of the selected keys: the scores of a token are never all in memory.
#include "ops/sparse_flash_attention.h"

#include <torch/library.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <vector>

#include "core/operator.h"
#include "cpu/common/parallel_tasks.h"
#include "cpu/common/query_key_product.h"
#include "cpu/common/sparse_attention_inputs.h"
#include "cpu/common/tile_gemm.h"
#include "cpu/common/token_rows.h"
#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {
namespace {

constexpr int64_t kMaxKeys = 128;  // per tile, so that keys and values stay in the L2 cache

template <typename Input, typename Operand>
class Attention {
 public:
  using T = Accumulator<Operand>;

  Attention(const SparseAttentionInputs& inputs, double scale)
      : heads_(inputs.heads),
        padded_heads_(round_up(inputs.heads, depth_step<Operand>)),
        size_(inputs.size),
        scale_(static_cast<T>(scale)),
        product_(padded_heads_, {inputs.size, inputs.rope_size}, kMaxKeys),
        value_tile_(inputs.value_is_key(), kMaxKeys, inputs.size),
        packed_values_(kMaxKeys, inputs.size),
        scores_(kMaxKeys, padded_heads_),
        by_key_(kMaxKeys, padded_heads_),
        probabilities_(padded_heads_, kMaxKeys),
        out_(padded_heads_, inputs.size),
        statistics_(3, padded_heads_) {}

  // Computes one token: out (heads, D), and unless they are null softmax_max and softmax_sum
  // (heads).
  void token(const SequenceInputs<Input>& inputs, int64_t token, Input* out, T* softmax_max,
             T* softmax_sum) {
    auto selected = inputs.selected(token);
    std::array<int64_t, kMaxKeys> positions;
    int64_t count = selected.next(positions.data(), kMaxKeys);
    if (count == 0) {
      std::fill_n(out, heads_ * size_, Input(0));
      if (softmax_max) {
        std::fill_n(softmax_max, heads_, T(0));
        std::fill_n(softmax_sum, heads_, T(0));
      }
      return;
    }
    // Not -inf, which would make NaN of tiles whose scores are all -inf.
    std::fill_n(max(), padded_heads_, std::numeric_limits<T>::lowest());
    std::fill_n(sum(), padded_heads_, T(0));
    product_.load_query(inputs.query, inputs.query_rope, token, heads_);
    for (bool first = true; count > 0; first = false) {
      add_keys(inputs, positions.data(), count, first);
      count = selected.next(positions.data(), kMaxKeys);
    }
    for (int64_t h = 0; h < heads_; ++h) {
      if (sum()[h] == 0) {
        // Every score is -inf: the softmax of that is none.
        max()[h] = -std::numeric_limits<T>::infinity();
        sum()[h] = std::numeric_limits<T>::quiet_NaN();
      }
    }
    store_heads(out_, 0, heads_, size_, [this](int64_t h) { return T(1) / sum()[h]; }, out);
    if (softmax_max) {
      std::copy_n(max(), heads_, softmax_max);
      std::copy_n(sum(), heads_, softmax_sum);
    }
  }

 private:
  void add_keys(const SequenceInputs<Input>& inputs, const int64_t* positions, int64_t count,
                bool first) {
    const int64_t tile_rows = product_.load_keys(inputs.key, inputs.key_rope, positions, count);
    product_.multiply(tile_rows, scores_);
    if (update_softmax(count) && !first) {
      rescale_out();
    }
    const auto& values =
        value_tile_.load(inputs.value, product_.keys(), positions, count, tile_rows);
    const auto packed =
        operand_b(tile_rows, size_, values.data(), values.stride(), packed_values_.data());
    zero_rows(by_key_, count, tile_rows);
    transpose(by_key_, tile_rows, padded_heads_, probabilities_);
    tile_gemm(padded_heads_, size_, tile_rows, probabilities_.data(), probabilities_.stride(),
              packed.data, packed.stride, out_.data(), out_.stride(), /*accumulate=*/!first);
  }

  // Computes exp(scores - max) with the running maximum. Returns whether the maximum rose for some
  // head; earlier results must then be rescaled by factor().
  bool update_softmax(int64_t count) {
    bool rose = false;
    vectorized([&rose, count, heads = padded_heads_, scale = scale_, scores = scores_.data(),
                by_key = by_key_.data(), max = max(), sum = sum(), factor = factor()] {
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
        factor[h] = exponential(factor[h] - max[h]);
        sum[h] *= factor[h];
      }
      for (int64_t i = 0; i < count; ++i) {
#pragma omp simd
        for (int64_t h = 0; h < heads; ++h) {
          const T e = exponential(scores[i * heads + h] - max[h]);
          sum[h] += e;
          by_key[i * heads + h] = round_to<Operand>(e);
        }
      }
      rose = changed != 0;
    });
    return rose;
  }

  void rescale_out() {
    for (int64_t h = 0; h < heads_; ++h) {
      scale(out_.row(h), factor()[h], out_.row(h), size_);
    }
  }

  T* max() const { return statistics_.row(0); }
  T* sum() const { return statistics_.row(1); }
  T* factor() const { return statistics_.row(2); }

  int64_t heads_;
  int64_t padded_heads_;
  int64_t size_;
  T scale_;
  QueryKeyProduct<Input, Operand> product_;
  ValueTile<Input, Operand> value_tile_;
  Tile<Operand> packed_values_;
  Tile<T> scores_;               // (keys, heads)
  Tile<Operand> by_key_;         // (keys, heads), exp(score - max)
  Tile<Operand> probabilities_;  // (heads, keys), the same
  Tile<T> out_;
  Tile<T> statistics_;
};

template <typename Input, typename Operand>
void attend(const SparseAttentionInputs& inputs, double scale,
            const SparseFlashAttention::Outputs& outputs) {
  using T = Accumulator<Operand>;
  struct Task {
    const SequenceInputs<Input>* sequence;
    int64_t token;
    int64_t cost;
  };
  std::vector<SequenceInputs<Input>> sequences;
  sequences.reserve(inputs.sequences.size());
  std::vector<Task> tasks;
  for (const auto& each : inputs.sequences) {
    const auto& sequence = sequences.emplace_back(inputs, each);
    for (int64_t token = 0; token < each.queries; ++token) {
      const int64_t blocks = blocks_of(sequence.visible.end(token), inputs.block_size);
      tasks.push_back({&sequence, token, std::min(sequence.count, blocks)});
    }
  }
  auto* out = std::get<0>(outputs).template mutable_data_ptr<Input>();
  const auto statistics_of = [](const at::Tensor& statistics, int64_t row) {
    return statistics.numel() > 0 ? statistics.mutable_data_ptr<T>() + row : nullptr;
  };
  const auto make_worker = [&] {
    return std::make_unique<Attention<Input, Operand>>(inputs, scale);
  };
  for_each_task(std::move(tasks), make_worker, [&](auto& attention, const Task& task) {
    const int64_t row = (task.sequence->sequence.query_begin + task.token) * inputs.heads;
    attention.token(*task.sequence, task.token, out + row * inputs.size,
                    statistics_of(std::get<1>(outputs), row),
                    statistics_of(std::get<2>(outputs), row));
  });
}

void sparse_flash_attention(const SparseFlashAttention& op,
                            SparseFlashAttention::Outputs& outputs) {
  const SparseAttentionInputs inputs(op, Selectable::all_keys);
  const int64_t tokens = token_count(inputs.query);
  const auto& [out, softmax_max, softmax_sum] = outputs;
  for (const auto& output : {out, softmax_max, softmax_sum}) {
    zero_unused_queries(output, tokens, inputs.sequences);
  }
  if (out.numel() > 0) {
    dispatch_operand(out.scalar_type(), [&]<typename Input, typename Operand>() {
      attend<Input, Operand>(inputs, op.options.scale_value, outputs);
    });
  }
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<SparseFlashAttention, sparse_flash_attention>(m);
}

}  // namespace
}  // namespace ascend_attn::cpu
