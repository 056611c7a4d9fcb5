// The forward pass of dense attention, shared by the operators.
#pragma once

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "cpu/common/attention_scores.h"
#include "cpu/common/attention_tiles.h"
#include "cpu/common/dense_attention.h"
#include "cpu/common/parallel_tasks.h"
#include "cpu/common/single_rows.h"
#include "cpu/common/tile_gemm.h"
#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

// The number of rows that share one packed block of keys.
inline constexpr int64_t kMaxRows = 8 * kRowBlock;

// The maximum of a row without keys: any score is larger, and its exponential is finite.
template <typename T>
inline constexpr T kLowest = static_cast<T>(std::numeric_limits<float>::lowest());

// The result of one row. The output is not yet divided by the sum, which is 0 if there was no key.
template <typename T>
struct RowResult {
  const T* out;
  T max;
  T sum;
};

// Rows of one key head, or all rows of neighbouring key heads.
struct RowsTask {
  const DenseSequence* sequence;
  int64_t key_head;
  int64_t key_heads;
  int64_t first_row;
  int64_t rows;
  int64_t cost;
};

// Returns whether the rows of a sequence read their keys in place: a single one for each key head.
// Not in float32 and float64, where the bits of a row do not depend on how many there are.
template <typename Input>
bool in_place(const DenseSequence& sequence, int64_t group) {
  return sizeof(Input) == 2 && sequence.queries * group == 1;
}

// Computes attention for blocks of rows, by online softmax over blocks of keys: a thread holds one
// tile of scores at a time.
template <typename Input, typename Operand>
class AttentionRows {
 public:
  using T = Accumulator<Operand>;

  explicit AttentionRows(const DenseAttention& attention)
      : attention_(attention),
        scores_of_(attention),
        keys_(attention.size, /*by_rows=*/false, /*transposed=*/true),
        values_(attention.value_size, /*by_rows=*/true, /*transposed=*/false),
        query_(kMaxRows, keys_.size()),
        out_(kMaxRows, values_.size()),
        scores_(kRowBlock, kKeyBlock),
        probabilities_(std::is_same_v<Operand, T> ? 0 : kRowBlock, kKeyBlock),
        statistics_(3, kMaxRows) {}

  // Calls store(head, query, RowResult<T>) for every row of the task.
  template <typename Store>
  void run(const RowsTask& task, const Store& store) {
    const int64_t group = attention_.group();
    for (int64_t h = 0; h < task.key_heads; ++h) {
      load_rows(query_rows<Input>(attention_.query, *task.sequence, (task.key_head + h) * group),
                group, task.first_row, task.rows, attention_.size, query_, h * task.rows);
    }
    std::fill_n(max(), kMaxRows, kLowest<T>);
    std::fill_n(sum(), kMaxRows, T(0));
    if (in_place<Input>(*task.sequence, group)) {
      attend_in_place(task);
    } else {
      attend_to_tiles(task);
    }
    for (int64_t h = 0; h < task.key_heads; ++h) {
      for (int64_t r = 0; r < task.rows; ++r) {
        const int64_t row = task.first_row + r;
        const int64_t at = h * task.rows + r;
        store((task.key_head + h) * group + row % group, row / group,
              RowResult<T>{out_.row(at), max()[at], sum()[at]});
      }
    }
  }

 private:
  // Rows of one key head, from `row` on in the tiles.
  struct Rows {
    const DenseSequence& sequence;
    int64_t key_head;
    int64_t first;
    int64_t count;
    int64_t row;
  };

  void attend_to_tiles(const RowsTask& task) {
    const auto& sequence = *task.sequence;
    const int64_t group = attention_.group();
    const auto key = key_rows<Input>(attention_.key, sequence, task.key_head);
    const auto value = key_rows<Input>(attention_.value, sequence, task.key_head);
    const auto& kept = sequence.kept;
    const int64_t last = kept.end((task.first_row + task.rows - 1) / group);
    std::array<bool, kMaxRows / kRowBlock> started{};
    for (int64_t begin = kept.begin(task.first_row / group); begin < last; begin += kKeyBlock) {
      const int64_t count = std::min(kKeyBlock, last - begin);
      keys_.load(key, begin, count);
      values_.load(value, begin, count);
      for (int64_t row = 0; row < task.rows; row += kRowBlock) {
        const int64_t height = std::min(kRowBlock, task.rows - row);
        const Rows rows{sequence, task.key_head, task.first_row + row, height, row};
        const TileColumns columns(sequence, group, rows.first, rows.count, begin, count);
        if (!columns.empty()) {
          multiply_keys(rows, columns);
          update_softmax(rows, begin, columns, started[row / kRowBlock]);
          add_values(rows, columns, started[row / kRowBlock]);
          started[row / kRowBlock] = true;
        }
      }
    }
  }

  // The key heads, each with a single row, take turns after a few keys: where those of a token are
  // adjacent, memory is read in its order.
  void attend_in_place(const RowsTask& task) {
    const auto& sequence = *task.sequence;
    const int64_t last = sequence.kept.end(0);
    zero_rows(out_, 0, task.key_heads);
    for (int64_t begin = sequence.kept.begin(0); begin < last; begin += kKeysInPlace) {
      const int64_t count = std::min(kKeysInPlace, last - begin);
      const TileColumns columns(sequence, /*group=*/1, 0, 1, begin, count);
      for (int64_t h = 0; h < task.key_heads; ++h) {
        const Rows rows{sequence, task.key_head + h, 0, 1, h};
        const bool last_head = h + 1 == task.key_heads;
        const int64_t next_head = last_head ? task.key_head : rows.key_head + 1;
        const int64_t next_begin = last_head ? std::min(begin + count, last - 1) : begin;
        const auto keys_of = [&](const at::Tensor& tensor) {
          return key_rows<Input>(tensor, sequence, rows.key_head, begin);
        };
        const auto next = [&](const at::Tensor& tensor) {
          return NextRows{key_rows<Input>(tensor, sequence, next_head, next_begin),
                          std::min(kKeysInPlace, last - next_begin)};
        };
        score_rows(query_.row(h), attention_.size, keys_of(attention_.key), count,
                   next(attention_.key), scores_.data());
        update_softmax(rows, begin, columns, /*started=*/true);
        add_rows(rounded(1, columns).data, attention_.value_size, keys_of(attention_.value), count,
                 next(attention_.value), out_.row(h));
      }
    }
  }

  void multiply_keys(const Rows& rows, const TileColumns& columns) {
    const auto keys = keys_.transposed(columns.begin);
    tile_gemm(product_rows(rows.count), columns.width(), keys_.size(), query_.row(rows.row),
              query_.stride(), keys.data, keys.stride, scores_.data() + columns.begin,
              scores_.stride(), /*accumulate=*/false);
  }

  void add_values(const Rows& rows, const TileColumns& columns, bool started) {
    const auto probabilities = rounded(product_rows(rows.count), columns);
    const auto values = values_.by_rows(columns.begin);
    tile_gemm(product_rows(rows.count), values_.size(), columns.width(), probabilities.data,
              probabilities.stride, values.data, values.stride, out_.row(rows.row), out_.stride(),
              /*accumulate=*/started);
  }

  // Turns products into the weights of their values, and rescales the outputs that have `started`.
  void update_softmax(const Rows& rows, int64_t key_begin, const TileColumns& columns,
                      bool started) {
    const auto for_each_kept = [&](const auto& change) {
      const int64_t group = attention_.group();
      for_each_kept_row(columns, rows.first, rows.count, rows.key_head * group, group,
                        [&](int64_t head, int64_t query, int64_t r) {
                          change(rows.sequence, head, query, key_begin + columns.row_begin[r],
                                 key_begin + columns.row_end[r],
                                 scores_.row(r) + columns.row_begin[r]);
                        });
    };
    if (scores_of_.has_terms()) {
      for_each_kept([&](const auto&... arguments) { scores_of_.finish(arguments...); });
    }
    exponentiate(rows.row, rows.count, columns);
    if (scores_of_.has_dropout()) {
      for_each_kept([&](const auto&... arguments) { scores_of_.drop(arguments...); });
    }
    for (int64_t r = rows.row; started && r < rows.row + rows.count; ++r) {
      if (factor()[r] != T(1)) {
        scale(out_.row(r), factor()[r], out_.row(r), attention_.value_size);
      }
    }
  }

  // Turns scores into exp(score - max) with the running maximum, and into 0 where a row does not
  // keep the key. Earlier results must be rescaled by factor().
  void exponentiate(int64_t row, int64_t rows, const TileColumns& columns) {
    vectorized([rows, scale = scores_of_.factor(), scores = scores_.data(), &columns,
                max = max() + row, sum = sum() + row, factor = factor() + row] {
      for (int64_t r = 0; r < rows; ++r) {
        T* s = scores + r * kKeyBlock;
        const int64_t begin = columns.row_begin[r];
        const int64_t end = columns.row_end[r];
        T largest = kLowest<T>;
#pragma omp simd reduction(max : largest)
        for (int64_t j = begin; j < end; ++j) {
          const T scaled = s[j] * scale;
          largest = scaled > largest ? scaled : largest;
        }
        largest = largest > max[r] ? largest : max[r];
        factor[r] = exponential(max[r] - largest);
        max[r] = largest;
        for (int64_t j = columns.begin; j < begin; ++j) {
          s[j] = 0;
        }
        T total = 0;
#pragma omp simd reduction(+ : total)
        for (int64_t j = begin; j < end; ++j) {
          s[j] = exponential(s[j] * scale - largest);
          total += s[j];
        }
        for (int64_t j = end; j < columns.end; ++j) {
          s[j] = 0;
        }
        sum[r] = sum[r] * factor[r] + total;
      }
    });
  }

  // Returns the tile of scores as operand A.
  OperandB<Operand> rounded(int64_t rows, const TileColumns& columns) {
    if constexpr (std::is_same_v<Operand, T>) {
      return {scores_.data() + columns.begin, scores_.stride()};
    } else {
      for (int64_t r = 0; r < rows; ++r) {
        convert(scores_.row(r) + columns.begin, probabilities_.row(r) + columns.begin,
                columns.width());
      }
      return {probabilities_.data() + columns.begin, probabilities_.stride()};
    }
  }

  T* max() const { return statistics_.row(0); }
  T* sum() const { return statistics_.row(1); }
  T* factor() const { return statistics_.row(2); }

  const DenseAttention& attention_;
  AttentionScores<Input, T> scores_of_;
  KeyTile<Operand> keys_;
  KeyTile<Operand> values_;
  Tile<Operand> query_;
  Tile<T> out_;
  Tile<T> scores_;
  Tile<Operand> probabilities_;
  Tile<T> statistics_;
};

// Returns how many key heads of a sequence that reads its keys in place share a task.
inline int64_t heads_in_turn(const DenseAttention& attention) {
  const auto sequences = static_cast<int64_t>(attention.sequences.size());
  const int64_t share = at::divup(attention.key_heads * sequences, at::get_num_threads());
  return std::clamp<int64_t>(share, 1, kMaxRows / kRowStep);
}

// Divides the rows into blocks, small enough for every thread to get several. Tasks that read their
// keys in place have several key heads.
template <typename Input>
std::vector<RowsTask> divide(const DenseAttention& attention) {
  int64_t all_rows = 0;
  for (const auto& sequence : attention.sequences) {
    all_rows += sequence.queries * attention.heads;
  }
  constexpr int64_t kTasksPerThread = 8;
  const int64_t share = all_rows / (kTasksPerThread * at::get_num_threads());
  const int64_t block = std::clamp(round_up(share, kRowBlock), kRowBlock, kMaxRows);
  std::vector<RowsTask> tasks;
  for (const auto& sequence : attention.sequences) {
    const int64_t rows = sequence.queries * attention.group();
    const int64_t most_heads =
        in_place<Input>(sequence, attention.group()) ? heads_in_turn(attention) : 1;
    for (int64_t head = 0; head < attention.key_heads; head += most_heads) {
      const int64_t heads = std::min(most_heads, attention.key_heads - head);
      for (int64_t row = 0; row < rows; row += block) {
        const int64_t count = std::min(block, rows - row);
        const int64_t middle = (row + count / 2) / attention.group();
        const auto& kept = sequence.kept;
        const int64_t keys = kept.end(middle) - kept.begin(middle);
        tasks.push_back({&sequence, head, heads, row, count, heads * count * keys});
      }
    }
  }
  return tasks;
}

// Calls store(sequence, head, query, result) for every row of every sequence.
template <typename Input, typename Operand, typename Store>
void attend_rows(const DenseAttention& attention, const Store& store) {
  using Worker = AttentionRows<Input, Operand>;
  for_each_task(
      divide<Input>(attention), [&] { return std::make_unique<Worker>(attention); },
      [&](Worker& worker, const RowsTask& task) {
        worker.run(task, [&](int64_t head, int64_t query, const auto& result) {
          store(*task.sequence, head, query, result);
        });
      });
}

}  // namespace ascend_attn::cpu
