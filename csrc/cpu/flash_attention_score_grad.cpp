// Processes one block of keys at a time. The gradients of its keys and values are then complete,
// while those of the queries accumulate over the blocks in fp32.
#include "ops/flash_attention_score.h"

#include <torch/library.h>

#include "cpu/common/dense_attention_grad.h"

#include <atomic>
#include <memory>
#include <vector>

#include "core/operator.h"
#include "cpu/common/parallel_tasks.h"

namespace ascend_attn::cpu {
namespace {

// Transposes `from` (rows, columns) into `to` (columns, kRowBlock), with rows rounded up to
// kRowStep.
template <typename T>
void transpose_tile(const Tile<T>& from, int64_t rows, int64_t columns, T* to) {
  vectorized([=, source = from.data(), stride = from.stride()] {
    for (int64_t i = 0; i < rows; i += kRowStep) {
      for (int64_t j = 0; j < columns; ++j) {
        for (int64_t k = i; k < i + kRowStep; ++k) {
          to[j * kRowBlock + k] = source[k * stride + j];
        }
      }
    }
  });
}

// Key heads are split into parts if there are fewer of them than threads: a part takes every
// parts-th block of keys.
struct KeysTask {
  const DenseSequence* sequence;
  int64_t key_head;
  int64_t part;
  int64_t head_index;  // of (sequence, key head)
  int64_t cost;
};

// The query gradients of one key head, one per part. The last part to finish sums them, in order.
template <typename T>
struct QueryGradients {
  std::vector<Tile<T>> parts;
  std::atomic<int64_t> missing;
};

template <typename Input, typename Operand>
class FlashAttentionGrad {
 public:
  using T = Accumulator<Operand>;

  FlashAttentionGrad(const DenseAttentionGrad& attention,
                     const FlashAttentionScoreGrad::Outputs& outputs)
      : attention_(attention.forward),
        dq_tensor_(attention_.by_head(std::get<0>(outputs), attention_.heads)),
        dk_tensor_(attention_.by_head(std::get<1>(outputs), attention_.key_heads)),
        dv_tensor_(attention_.by_head(std::get<2>(outputs), attention_.key_heads)),
        tile_(attention),
        packed_(kRowBlock, kKeyBlock),
        rounded_(kRowBlock, kKeyBlock),
        dk_(tile_.keys().size(), kKeyBlock),
        dv_(tile_.values().size(), kKeyBlock) {}

  void run(const KeysTask& task, QueryGradients<T>& dq) {
    const auto& sequence = *task.sequence;
    const auto parts = static_cast<int64_t>(dq.parts.size());
    tile_.start(sequence, task.key_head);
    transpose_queries(sequence.queries * attention_.group());
    auto& own_dq = dq.parts[task.part];
    own_dq =
        Tile<T>(round_up(sequence.queries * attention_.group(), kRowBlock), tile_.keys().size());
    for (int64_t begin = task.part * kKeyBlock; begin < sequence.keys; begin += parts * kKeyBlock) {
      add_keys(task, begin, std::min(kKeyBlock, sequence.keys - begin), own_dq);
    }
    if (--dq.missing == 0) {
      store_queries(task, dq);
    }
  }

 private:
  // Transposes all rows at once, because every block of keys needs them: one (size, kRowBlock)
  // matrix per block of rows.
  void transpose_queries(int64_t all_rows) {
    const int64_t blocks = (all_rows + kRowBlock - 1) / kRowBlock;
    query_transposed_ = Tile<Operand>(blocks * tile_.keys().size(), kRowBlock);
    d_out_transposed_ = Tile<Operand>(blocks * tile_.values().size(), kRowBlock);
    for (int64_t row = 0; row < all_rows; row += kRowBlock) {
      const int64_t rows = std::min(kRowBlock, all_rows - row);
      const int64_t block = row / kRowBlock;
      tile_.load_queries(row, rows);
      transpose_tile(tile_.query(), rows, tile_.keys().size(),
                     query_transposed_.row(block * tile_.keys().size()));
      transpose_tile(tile_.d_out(), rows, tile_.values().size(),
                     d_out_transposed_.row(block * tile_.values().size()));
    }
  }

  void add_keys(const KeysTask& task, int64_t begin, int64_t count, const Tile<T>& dq) {
    const auto& sequence = *task.sequence;
    const int64_t all_rows = sequence.queries * attention_.group();
    tile_.load_keys(begin, count);
    zero_rows(dk_, 0, tile_.keys().size());
    zero_rows(dv_, 0, tile_.values().size());
    for (int64_t row = 0; row < all_rows; row += kRowBlock) {
      const int64_t rows = std::min(kRowBlock, all_rows - row);
      const TileColumns columns(sequence, attention_.group(), row, rows, begin, count);
      if (!columns.empty()) {
        tile_.run(row, rows, columns);
        add_products(row, round_up(rows, kRowStep), columns, dq);
      }
    }
    store_keys(dv_, T(1), dv_tensor_, task, begin, count, attention_.value_size);
    store_keys(dk_, static_cast<T>(attention_.scale), dk_tensor_, task, begin, count,
               attention_.size);
  }

  // dv^T += dy^T * P, dk^T += q^T * dS, dq += dS * k
  void add_products(int64_t row, int64_t rows, const TileColumns& columns, const Tile<T>& dq) {
    const int64_t width = columns.width();
    const auto probabilities = round(tile_.probabilities(), rows, columns);
    multiply_rows(d_out_transposed_, row, tile_.values().size(), probabilities, rows, columns, dv_);

    const auto d_scores = round(tile_.d_scores(), rows, columns);
    multiply_rows(query_transposed_, row, tile_.keys().size(), d_scores, rows, columns, dk_);

    const auto keys = tile_.keys().by_rows(columns.begin);
    tile_gemm(rows, tile_.keys().size(), width, d_scores.data, d_scores.stride, keys.data,
              keys.stride, dq.row(row), dq.stride(), /*accumulate=*/true);
  }

  void multiply_rows(const Tile<Operand>& transposed, int64_t row, int64_t size,
                     const OperandB<Operand>& operand, int64_t rows, const TileColumns& columns,
                     const Tile<T>& sum) {
    const auto packed =
        operand_b(rows, columns.width(), operand.data, operand.stride, packed_.data());
    const Operand* of_rows = transposed.row(row / kRowBlock * size);
    tile_gemm(size, columns.width(), rows, of_rows, transposed.stride(), packed.data, packed.stride,
              sum.data() + columns.begin, sum.stride(), /*accumulate=*/true);
  }

  // Returns the columns of a tile, converted to the operand type.
  OperandB<Operand> round(const Tile<T>& tile, int64_t rows, const TileColumns& columns) {
    if constexpr (std::is_same_v<Operand, T>) {
      return {tile.data() + columns.begin, tile.stride()};
    } else {
      for (int64_t r = 0; r < rows; ++r) {
        convert(tile.row(r) + columns.begin, rounded_.row(r), columns.width());
      }
      return {rounded_.data(), rounded_.stride()};
    }
  }

  void store_keys(const Tile<T>& transposed, T factor, const at::Tensor& gradient,
                  const KeysTask& task, int64_t begin, int64_t count, int64_t size) {
    const auto& sequence = *task.sequence;
    const HeadRows<Input> rows(gradient.mutable_data_ptr<Input>(), gradient, sequence.batch,
                               task.key_head, sequence.key_begin + begin);
    vectorized([=, from = transposed.data(), stride = transposed.stride()] {
      // In blocks, because a whole row of `from` is one element of each of many cache lines.
      constexpr int64_t block = 16;
      for (int64_t first = 0; first < count; first += block) {
        const int64_t end = std::min(first + block, count);
        for (int64_t d = 0; d < size; ++d) {
          for (int64_t j = first; j < end; ++j) {
            rows.row(j)[d] = static_cast<Input>(factor * from[d * stride + j]);
          }
        }
      }
    });
  }

  void store_queries(const KeysTask& task, QueryGradients<T>& dq) {
    const auto& sequence = *task.sequence;
    const int64_t group = attention_.group();
    const HeadRows<Input> rows(dq_tensor_.mutable_data_ptr<Input>(), dq_tensor_, sequence.batch,
                               task.key_head * group, sequence.query_begin);
    const auto& sum = dq.parts.front();
    for (int64_t row = 0; row < sequence.queries * group; ++row) {
      for (size_t part = 1; part < dq.parts.size(); ++part) {
        add(dq.parts[part].row(row), sum.row(row), attention_.size);
      }
      scale(sum.row(row), static_cast<T>(attention_.scale), rows.row(row / group, row % group),
            attention_.size);
    }
    dq.parts.clear();
  }

  const DenseAttention& attention_;
  at::Tensor dq_tensor_, dk_tensor_, dv_tensor_;
  ScoreGradient<Input, Operand> tile_;
  Tile<Operand> query_transposed_;
  Tile<Operand> d_out_transposed_;
  Tile<Operand> packed_;
  Tile<Operand> rounded_;
  Tile<T> dk_;  // (size, keys)
  Tile<T> dv_;  // (value size, keys)
};

template <typename Input, typename Operand>
void differentiate(const DenseAttentionGrad& attention,
                   const FlashAttentionScoreGrad::Outputs& outputs) {
  using T = Accumulator<Operand>;
  using Worker = FlashAttentionGrad<Input, Operand>;
  const auto& forward = attention.forward;
  const auto heads = static_cast<int64_t>(forward.sequences.size()) * forward.key_heads;
  if (heads == 0) {
    return;
  }
  const int64_t wanted = (2 * at::get_num_threads() + heads - 1) / heads;
  std::vector<QueryGradients<T>> dq(heads);
  std::vector<KeysTask> tasks;
  for (const auto& sequence : forward.sequences) {
    const int64_t blocks = std::max<int64_t>((sequence.keys + kKeyBlock - 1) / kKeyBlock, 1);
    const int64_t parts = std::min(wanted, blocks);
    for (int64_t head = 0; head < forward.key_heads; ++head) {
      const int64_t index = sequence.index * forward.key_heads + head;
      dq[index].parts.resize(parts);
      dq[index].missing = parts;
      for (int64_t part = 0; part < parts; ++part) {
        tasks.push_back({&sequence, head, part, index, sequence.queries * sequence.keys / parts});
      }
    }
  }
  for_each_task(
      tasks, [&] { return std::make_unique<Worker>(attention, outputs); },
      [&](Worker& worker, const KeysTask& task) { worker.run(task, dq[task.head_index]); });
}

void flash_attention_score_grad(const FlashAttentionScoreGrad& op,
                                FlashAttentionScoreGrad::Outputs& outputs) {
  const DenseAttentionGrad attention(op);
  const auto& [dq, dk, dv] = outputs;
  if (attention.forward.layout == Layout::TND) {
    const auto& sequences = attention.forward.sequences;
    zero_unused_queries(dq, dq.size(0), sequences);
    zero_unused_keys(dk, dk.size(0), sequences);
    zero_unused_keys(dv, dv.size(0), sequences);
  }
  dispatch_operand(op.query.scalar_type(), [&]<typename Input, typename Operand>() {
    differentiate<Input, Operand>(attention, outputs);
  });
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<FlashAttentionScoreGrad, flash_attention_score_grad>(m);
}

}  // namespace
}  // namespace ascend_attn::cpu
