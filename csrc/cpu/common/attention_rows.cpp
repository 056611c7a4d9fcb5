#include "cpu/common/attention_rows.h"

#include <array>
#include <bit>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "cpu/common/attention_scores.h"
#include "cpu/common/few_rows.h"
#include "cpu/common/partial_attention.h"

namespace ascend_attn::cpu {
namespace {

// The keys of a part. Parts end at multiples of kPartKeys, whichever rows a task has.
struct KeyRange {
  KeyRange(const RowsTask& task, int64_t part) {
    const int64_t first = (task.begin / kPartKeys + part) * kPartKeys;
    begin = std::max(task.begin, first);
    end = std::min(task.end, first + kPartKeys);
  }

  int64_t begin;
  int64_t end;
};

// Where rows read their keys in place, the keys of a tile, and those that one head reads before the
// next one does where the heads of a token are adjacent.
constexpr int64_t kKeysInPlace = kKeyStep;
constexpr int64_t kKeysInTurn = 16;

// Computes attention for blocks of rows, by online softmax over blocks of keys: a thread holds one
// tile of scores at a time. Keys and values are of Input as well, or int8.
template <typename Input, typename Operand, typename Key = Input>
class AttentionRows {
 public:
  using T = Accumulator<Operand>;

  // `rows` is a multiple of kRowStep that no task exceeds.
  AttentionRows(const DenseAttention& attention, int64_t rows)
      : attention_(attention), rows_(rows) {}

  // Returns the size of a tile that holds the results of any of these tasks.
  static ResultSize result_size(const DenseAttention& attention,
                                const std::vector<RowsTask>& tasks) {
    int64_t rows = 0;
    for (const auto& task : tasks) {
      rows = std::max(rows, round_up(task.rows(), kRowStep));
    }
    return {rows, round_up(attention.value_size, depth_step<Operand>)};
  }

  void load(const RowsTask& task) {
    const int64_t group = attention_.group();
    for (int64_t h = 0; h < task.key_heads; ++h) {
      load_rows(joined_query_rows<Input>(attention_, *task.sequence, (task.key_head + h) * group),
                group, task.first_row, task.rows_of_head, query_, h * task.rows_of_head);
    }
  }

  // Computes a part of the task that was loaded, and sets the number of its keys.
  void part(const RowsTask& task, int64_t index, Partial<T>& result) {
    const KeyRange keys(task, index);
    result_ = result;
    std::fill_n(result_.max, task.rows(), std::numeric_limits<T>::lowest());
    std::fill_n(result_.sum, task.rows(), T(0));
    // The first part has the sink, since parts are merged.
    if (attention_.sink.defined() && index == 0) {
      start_with_sinks(task);
    }
    if (attention_.in_place(*task.sequence)) {
      attend_in_place(task, keys);
    } else {
      attend_to_tiles(task, keys);
    }
    result.keys = keys.end - keys.begin;
  }

 private:
  void start_with_sinks(const RowsTask& task) {
    const T* sinks = attention_.sink.const_data_ptr<T>();
    for (int64_t at = 0; at < task.rows(); ++at) {
      RowResult<T> row{nullptr, result_.max[at], result_.sum[at]};
      row.start_with(sinks[task.head(at, attention_.group())]);
      result_.max[at] = row.max;
      result_.sum[at] = row.sum;
    }
  }

  void attend_to_tiles(const RowsTask& task, const KeyRange& part) {
    const auto& sequence = *task.sequence;
    const auto key = HeadKeys<Key>::keys(attention_, sequence, task.key_head);
    const auto value = HeadKeys<Key>::values(attention_, sequence, task.key_head);
    std::array<bool, kMaxRows / kRowBlock> started{};
    auto& keys = key_tile();
    auto& values = value_tile();
    for_each_key_block(part.begin, part.end, key_block_, [&](int64_t begin, int64_t count) {
      keys.load(key, begin, count);
      values.load(value, begin, count);
      for_each_tile(sequence, attention_.group(), task.first_row, task.rows(), begin, count,
                    [&](const ScoreTile& tile) {
                      const int64_t row = tile.first_row - task.first_row;
                      bool& has_started = started[row / kRowBlock];
                      const int64_t rows = product_rows(tile.rows);
                      tile_gemm({rows, tile.width(), keys.size(), query_.from(row),
                                 keys.transposed(tile.begin), scores_.from(0, tile.begin), false});
                      update_softmax(tile, task.key_head, row, scores_, has_started);
                      tile_gemm({rows, value_size_, tile.width(),
                                 as_operand(scores_, rows, tile, probabilities_),
                                 values.by_rows(tile.begin), out(row), has_started});
                      has_started = true;
                    });
    });
    // Rows that keep other parts alone are merged with those.
    for (int64_t row = 0; row < task.rows(); row += kRowBlock) {
      if (!started[row / kRowBlock]) {
        std::fill_n(out(row).data(), std::min(kRowBlock, task.rows() - row) * value_size_, T(0));
      }
    }
  }

  void attend_in_place(const RowsTask& task, const KeyRange& part) {
    const auto& sequence = *task.sequence;
    const int64_t rows = task.rows_of_head;
    std::fill_n(out(0).data(), task.rows() * value_size_, T(0));
    const auto query =
        in_order_of_keys<Key, Operand>(query_, task.rows(), attention_.size, ordered_query_);
    for (int64_t begin = part.begin; begin < part.end; begin += kKeysInPlace) {
      const int64_t count = std::min(kKeysInPlace, part.end - begin);
      const ScoreTile tile(sequence, attention_.group(), task.first_row, rows, begin, count);
      if (tile.empty()) {
        continue;
      }
      if (attention_.whole_keys()) {
        for_each_run(task, begin, count, part.end, [&](int64_t first, const KeysInPlace& keys) {
          const auto key = key_rows<Key>(attention_.key, sequence, task.key_head, first);
          score_rows<T, Operand>(in_turn(task, attention_.key), query, attention_.size, key, keys,
                                 scores_.from(0, first - begin));
        });
      } else {
        multiply_copied_keys(task, query, begin, count);
      }
      for (int64_t h = 0; h < task.key_heads; ++h) {
        update_softmax(tile, task.key_head + h, h * rows, scores_.from(h * rows), true);
      }
      const auto weights = as_operand(scores_, task.rows(), tile, probabilities_);
      if (attention_.whole_values()) {
        for_each_run(task, begin, count, part.end, [&](int64_t first, const KeysInPlace& keys) {
          const auto value = key_rows<Key>(attention_.value, sequence, task.key_head, first);
          add_rows<T, Operand>(in_turn(task, attention_.value), weights.from(0, first - begin),
                               attention_.value_size, value, keys, out(0));
        });
      } else {
        add_copied_values(task, begin, count, weights);
      }
    }
    // Copied values are operands.
    attention_.whole_values() ? restore_order<Key>(out(0), task.rows(), attention_.value_size)
                              : restore_order<Operand>(out(0), task.rows(), attention_.value_size);
  }

  // The scores of keys that are several rows of memory. They have the bits of those of whole keys.
  void multiply_copied_keys(const RowsTask& task, const Matrix<const Operand>& query, int64_t begin,
                            int64_t count) {
    const int64_t rows = task.rows_of_head;
    for (int64_t h = 0; h < task.key_heads; ++h) {
      const auto key = HeadKeys<Key>::keys(attention_, *task.sequence, task.key_head + h);
      const auto copied = in_order_of_keys<Key, Operand>(key_tile().read(key, begin, count), count,
                                                         attention_.size, ordered_keys_);
      score_rows<T, Operand>({1, rows, count}, query.from(h * rows), attention_.size,
                             rows_of(copied), {count, count}, scores_.from(h * rows));
    }
  }

  // The same for the outputs.
  void add_copied_values(const RowsTask& task, int64_t begin, int64_t count,
                         const Matrix<const Operand>& weights) {
    const int64_t rows = task.rows_of_head;
    for (int64_t h = 0; h < task.key_heads; ++h) {
      const auto value = HeadKeys<Key>::values(attention_, *task.sequence, task.key_head + h);
      add_rows<T, Operand>({1, rows, count}, weights.from(h * rows), attention_.value_size,
                           rows_of(value_tile().read(value, begin, count)), {count, count},
                           out(h * rows));
    }
  }

  // Calls function(first key, keys) for the keys of a tile that lie in memory as in the sequence.
  template <typename Function>
  void for_each_run(const RowsTask& task, int64_t begin, int64_t count, int64_t last,
                    const Function& function) const {
    for (int64_t first = begin; first < begin + count;) {
      const int64_t of_page = run_of_keys(attention_.key, *task.sequence, first);
      const int64_t keys = std::min(begin + count - first, of_page);
      function(first, {keys, std::min(last - first, of_page)});
      first += keys;
    }
  }

  static HeadsInTurn in_turn(const RowsTask& task, const at::Tensor& tensor) {
    const bool adjacent_heads = tensor.stride(1) < tensor.stride(2);
    return {task.key_heads, task.rows_of_head, adjacent_heads ? kKeysInTurn : kKeysInPlace};
  }

  // Turns products into the weights of their values, and rescales the outputs, from `row` on, that
  // have `started`.
  void update_softmax(const ScoreTile& tile, int64_t key_head, int64_t row, const Matrix<T>& scores,
                      bool started) {
    const int64_t first_head = key_head * attention_.group();
    scores_of_.finish(tile, first_head, scores);
    exponentiate(tile, row, scores);
    scores_of_.multiply_weights(tile, first_head, scores);
    for (int64_t r = row; started && r < row + tile.rows; ++r) {
      if (factor_.data()[r] != T(1)) {
        scale(out(r).data(), factor_.data()[r], out(r).data(), attention_.value_size);
      }
    }
  }

  // Turns scores into exp(score - max) with the running maximum, and into 0 where a row does not
  // keep the key. Earlier results must be rescaled by factor_.
  void exponentiate(const ScoreTile& columns, int64_t row, const Matrix<T>& products) {
    vectorized([rows = columns.rows, scale = scores_of_.factor(), scores = products.data(),
                &columns, max = result_.max + row, sum = result_.sum + row,
                factor = factor_.data() + row](auto bytes) {
      for (int64_t r = 0; r < rows; ++r) {
        T* s = scores + r * kKeyBlock;
        const int64_t begin = columns.row_begin[r];
        const int64_t end = columns.row_end[r];
        const T largest = largest_of<bytes>(max[r], s + begin, scale, end - begin);
        factor[r] = softmax_weight(max[r], largest);
        max[r] = largest;
        for (int64_t j = columns.begin; j < begin; ++j) {
          s[j] = 0;
        }
        T total = 0;
#pragma omp simd reduction(+ : total)
        for (int64_t j = begin; j < end; ++j) {
          s[j] = softmax_weight(rounded_product(s[j], scale), largest);
          total += s[j];
        }
        for (int64_t j = end; j < columns.end; ++j) {
          s[j] = 0;
        }
        sum[r] = sum[r] * factor[r] + total;
      }
    });
  }

  // As many keys as stay in the L2 cache with their values, in which several blocks of rows read
  // them.
  static int64_t key_block(const DenseAttention& attention) {
    constexpr int64_t cache = 512 << 10;
    const int64_t columns = std::max<int64_t>(attention.size + attention.value_size, 1);
    const auto keys = static_cast<uint64_t>(cache / (columns * sizeof(Operand)));
    return std::clamp(static_cast<int64_t>(std::bit_floor(keys)), kKeyStep, kKeyBlock);
  }

  // The tiles of keys and values, which rows that read them in place do without.
  KeyTile<Operand>& key_tile() {
    if (!keys_) {
      keys_.emplace(attention_.size, /*by_rows=*/false, /*transposed=*/true, key_block_);
    }
    return *keys_;
  }
  KeyTile<Operand>& value_tile() {
    if (!values_) {
      values_.emplace(attention_.value_size, /*by_rows=*/true, /*transposed=*/false, key_block_);
    }
    return *values_;
  }

  Matrix<T> out(int64_t row) const { return {result_.out + row * value_size_, value_size_}; }

  const DenseAttention& attention_;
  AttentionScores<Input, T> scores_of_{attention_};
  int64_t rows_;
  int64_t value_size_ = round_up(attention_.value_size, depth_step<Operand>);
  int64_t key_block_ = key_block(attention_);
  std::optional<KeyTile<Operand>> keys_, values_;
  // load_rows zeroes up to a step of rows behind those of the last head.
  Tile<Operand> query_{rows_ + kRowStep, round_up(attention_.size, depth_step<Operand>)};
  Tile<Operand> ordered_query_{kChangesOrder<Key, Operand> ? std::min(rows_, kRowBlock) : 0,
                               query_.stride(), TileContent::unset};
  Tile<Operand> ordered_keys_{kChangesOrder<Key, Operand> ? kKeysInPlace : 0, query_.stride(),
                              TileContent::unset};
  Partial<T> result_{};
  Tile<T> scores_{std::min(rows_, kRowBlock), kKeyBlock};
  Tile<Operand> probabilities_{std::is_same_v<Operand, T> ? 0 : std::min(rows_, kRowBlock),
                               kKeyBlock};
  Tile<T> factor_{1, kMaxRows};
};

// Returns how many key heads of a sequence that reads its keys in place share a task, each with so
// many rows.
int64_t heads_in_turn(const DenseAttention& attention, int64_t rows) {
  const auto sequences = static_cast<int64_t>(attention.sequences.size());
  const int64_t share = at::divup(attention.key_heads * sequences, at::get_num_threads());
  return std::clamp<int64_t>(share, 1, kRowBlock / rows);
}

template <typename Input, typename Operand, typename Key = Input>
void attend_rows(const DenseAttention& attention, const DenseOutputs& outputs) {
  using Worker = AttentionRows<Input, Operand, Key>;
  using T = Accumulator<Operand>;
  const OutputRows<Input, T> rows(attention, outputs);
  const int64_t group = attention.group();
  auto tasks = divide(attention);
  const auto size = Worker::result_size(attention, tasks);
  attend_to_parts<T>(
      std::move(tasks), size, [&] { return std::make_unique<Worker>(attention, size.rows); },
      [&](const RowsTask& task, const Partial<T>& result, int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
          const int64_t row = task.first_row + at % task.rows_of_head;
          const auto of_row = result.keys > 0 ? RowResult<T>{result.out + at * size.columns,
                                                             result.max[at], result.sum[at]}
                                              : RowResult<T>{};
          rows.store(*task.sequence, task.head(at, group), row / group, of_row);
        }
      });
}

}  // namespace

std::vector<RowsTask> divide(const DenseAttention& attention, int64_t most_rows) {
  int64_t all_rows = 0;
  for (const auto& sequence : attention.sequences) {
    all_rows += sequence.queries * attention.heads;
  }
  constexpr int64_t kTasksPerThread = 8;
  const int64_t share = all_rows / (kTasksPerThread * at::get_num_threads());
  const int64_t block = std::clamp(round_up(share, kRowBlock), kRowBlock, most_rows);
  std::vector<RowsTask> tasks;
  for (const auto& sequence : attention.sequences) {
    const int64_t rows = sequence.queries * attention.group();
    const int64_t most_heads = attention.in_place(sequence) ? heads_in_turn(attention, rows) : 1;
    for (int64_t head = 0; head < attention.key_heads; head += most_heads) {
      const int64_t heads = std::min(most_heads, attention.key_heads - head);
      for (int64_t row = 0; row < rows; row += block) {
        const int64_t count = std::min(block, rows - row);
        const auto token = [&](int64_t at) { return (row + at) / attention.group(); };
        const auto& kept = sequence.kept;
        const int64_t usual = kept.end(token(count / 2)) - kept.begin(token(count / 2));
        tasks.push_back({&sequence, head, heads, row, count, kept.begin(token(0)),
                         kept.end(token(count - 1)), heads * count * usual});
      }
    }
  }
  return tasks;
}

void attend(const DenseAttention& attention, const DenseOutputs& outputs) {
  if (attention.key.scalar_type() == at::kChar) {
    return attention.query.scalar_type() == at::kDouble
               ? attend_rows<double, double, int8_t>(attention, outputs)
               : attend_rows<float, float, int8_t>(attention, outputs);
  }
  dispatch_operand(attention.query.scalar_type(), [&]<typename Input, typename Operand>() {
    attend_rows<Input, Operand>(attention, outputs);
  });
}

}  // namespace ascend_attn::cpu
