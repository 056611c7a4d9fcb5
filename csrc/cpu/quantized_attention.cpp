// Two passes over the keys, because the exponentials are rounded to 8 bits relative to the largest
// score of the WHOLE row: an online softmax would round them relative to another one. The first
// pass finds the largest score, the second one rounds and multiplies.
#include "cpu/quantized_attention.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "cpu/attention_tiles.h"
#include "cpu/parallel_tasks.h"
#include "cpu/tile_gemm.h"
#include "cpu/vectorized.h"

namespace ascend_attn::cpu {
namespace {

// Rows that share the packing of a block of keys.
constexpr int64_t kMaxRows = 8 * kRowBlock;
// Products of query and key that a thread keeps from the first pass for the second, in tiles of
// 64 KB. With more keys than they have room for, the second pass multiplies again.
constexpr int64_t kKeptTiles = 64;
// tile_gemm wants an unsigned A: query + 128.
constexpr int32_t kQueryOffset = 128;
// As many products of exponential and value, of 128 * 128 each, as an int32 can add up.
constexpr int64_t kExactKeys = (int64_t{1} << 31) / (128 * 128) - kKeyBlock;

constexpr int32_t kNoScore = std::numeric_limits<int32_t>::min();
constexpr float kLargestHalf = 65504.0f;
// Added to a small number, leaves the nearest integer in the low bits; ties to even.
constexpr float kRounder = 12582912.0f;

struct RowsTask {
  const AttentionSequence* sequence;
  int64_t key_head;
  int64_t first_row;
  int64_t rows;
  int64_t cost;
};

// The nearest number that a half can represent, in float; ties to even. What is too large for a
// half stays finite.
inline float round_to_half(float x) {
  // Behind a sum with 1.5 * 2^13 times the power of two in x stands as much as half has: 10 bits of
  // x's fraction. Halves below 2^-14 have the spacing of those above.
  const float power = std::bit_cast<float>(std::bit_cast<uint32_t>(x) & uint32_t{0x7f800000});
  const float rounder = 12288.0f * (power > 0x1p-14f ? power : 0x1p-14f);
  return (x + rounder) - rounder;
}

// The score of an integer product: fp16(saturate(product * deq_scale1)) * fp16(scale), in fp16.
struct Score {
  float deq_scale;
  float scale;

  float operator()(int32_t product) const {
    float x = static_cast<float>(product) * deq_scale;
    x = x > kLargestHalf ? kLargestHalf : x;
    x = x < -kLargestHalf ? -kLargestHalf : x;
    return round_to_half(round_to_half(x) * scale);
  }
  // Scores grow with the products, or fall.
  bool falls() const { return (deq_scale < 0) != (scale < 0); }
};

template <typename Output>
class QuantizedAttention {
 public:
  QuantizedAttention(const DenseAttention& attention, const Quantization& quantization,
                     const at::Tensor& out, int64_t rows)
      : attention_(attention),
        quantization_(quantization),
        score_{quantization.deq_scale1, static_cast<at::Half>(static_cast<float>(attention.scale))},
        out_tensor_(out),
        out_data_(out.mutable_data_ptr<Output>()),
        mask_(attention.mask.defined()
                  ? static_cast<const uint8_t*>(attention.mask.const_data_ptr())
                  : nullptr),
        keys_(attention.size, /*by_rows=*/false, /*transposed=*/true),
        values_(attention.value_size, /*by_rows=*/true, /*transposed=*/false),
        query_(rows, keys_.size()),
        key_terms_(kKeptTiles, kKeyBlock),
        products_(kKeptTiles * kRowBlock, kKeyBlock),
        exponentials_(kRowBlock, kKeyBlock),
        sums_(rows, values_.size()),
        out_(rows, attention.value_size),
        largest_(1, rows),
        statistics_(2, rows) {}

  void run(const RowsTask& task) {
    const auto& sequence = *task.sequence;
    const int64_t group = attention_.group();
    load_query(task);
    std::fill_n(largest_.data(), task.rows, kNoScore);
    std::fill_n(sum(), task.rows, 0.0f);
    std::fill_n(out_.data(), task.rows * out_.stride(), 0.0f);

    const auto key = key_rows<int8_t>(attention_.key, sequence, task.key_head);
    const auto value = key_rows<int8_t>(attention_.value, sequence, task.key_head);
    const auto& kept = sequence.kept;
    const int64_t first = kept.begin(task.first_row / group);
    const int64_t last = kept.end((task.first_row + task.rows - 1) / group);
    const int64_t row_blocks = (task.rows + kRowBlock - 1) / kRowBlock;
    const bool keeps = row_blocks * ((last - first + kKeyBlock - 1) / kKeyBlock) <= kKeptTiles;
    const auto for_each_tile = [&](const auto& load, const auto& function) {
      int64_t tile = 0;
      int64_t block = 0;
      for (int64_t begin = first; begin < last; begin += kKeyBlock) {
        const int64_t count = std::min(kKeyBlock, last - begin);
        int32_t* terms = key_terms_.row(keeps ? block++ : 0);
        load(begin, count, terms);
        for (int64_t row = 0; row < task.rows; row += kRowBlock) {
          const int64_t rows = std::min(kRowBlock, task.rows - row);
          const TileColumns columns(sequence, group, task.first_row + row, rows, begin, count);
          if (!columns.empty()) {
            function(row, rows, begin, columns, terms,
                     products_.row(keeps ? kRowBlock * tile++ : 0));
          }
        }
      }
    };
    for_each_tile(
        [&](int64_t begin, int64_t count, int32_t* terms) { load_keys(key, begin, count, terms); },
        [&](int64_t row, int64_t rows, int64_t begin, const TileColumns& columns,
            const int32_t* terms, int32_t* products) {
          multiply(row, rows, columns, products);
          update_largest(task, row, rows, begin, columns, terms, products);
        });
    for (int64_t r = 0; r < task.rows; ++r) {
      const int32_t largest = largest_.data()[r];
      max()[r] = largest == kNoScore ? 0.0f : score_(score_.falls() ? ~largest : largest);
    }
    int64_t added = 0;
    for_each_tile(
        [&](int64_t begin, int64_t count, int32_t* terms) {
          if (!keeps) {
            load_keys(key, begin, count, terms);
          }
          values_.load(value, begin, count);
          if (added + count > kExactKeys) {
            flush(task.rows);
            added = 0;
          }
          if (added == 0) {
            zero_rows(sums_, 0, task.rows);
          }
          added += count;
        },
        [&](int64_t row, int64_t rows, int64_t begin, const TileColumns& columns,
            const int32_t* terms, int32_t* products) {
          if (!keeps) {
            multiply(row, rows, columns, products);
          }
          exponentiate(task, row, rows, begin, columns, terms, products);
          const auto values = values_.by_rows(columns.begin);
          tile_gemm(round_up(rows, kRowStep), values_.size(), columns.width(),
                    exponentials_.data() + columns.begin, exponentials_.stride(), values.data,
                    values.stride, sums_.row(row), sums_.stride(), /*accumulate=*/true);
        });
    if (added > 0) {
      flush(task.rows);
    }
    store(task);
  }

 private:
  void load_query(const RowsTask& task) {
    const int64_t group = attention_.group();
    const auto rows = query_rows<int8_t>(attention_.query, *task.sequence, task.key_head * group);
    for (int64_t r = 0; r < task.rows; ++r) {
      const int64_t at = task.first_row + r;
      vectorized(
          [from = rows.row(at / group, at % group), to = query_.row(r), size = attention_.size] {
            for (int64_t d = 0; d < size; ++d) {
              to[d] = static_cast<uint8_t>(from[d] + kQueryOffset);
            }
          });
    }
    zero_rows(query_, task.rows, round_up(task.rows, kRowStep));
  }

  void load_keys(const HeadRows<const int8_t>& rows, int64_t begin, int64_t count, int32_t* terms) {
    keys_.load(rows, begin, count);
    // What query + 128 adds to the products, taken away.
    for (int64_t j = 0; j < count; ++j) {
      vectorized([row = rows.row(begin + j), term = terms + j, size = attention_.size] {
        int32_t sum = 0;
        for (int64_t d = 0; d < size; ++d) {
          sum += row[d];
        }
        *term = -kQueryOffset * sum;
      });
    }
  }

  void multiply(int64_t row, int64_t rows, const TileColumns& columns, int32_t* products) {
    const auto keys = keys_.transposed(columns.begin);
    const int64_t padded_rows = round_up(rows, kRowStep);
    tile_gemm(padded_rows, columns.width(), keys_.size(), query_.row(row), query_.stride(),
              keys.data, keys.stride, products + columns.begin, kKeyBlock, /*accumulate=*/false);
  }

  // Of the rows of a tile; nothing without a mask.
  const std::array<const uint8_t*, kRowBlock>& mask_rows(const RowsTask& task, int64_t row,
                                                         int64_t rows, int64_t key_begin) {
    const int64_t group = attention_.group();
    for (int64_t r = 0; mask_ != nullptr && r < rows; ++r) {
      const int64_t at = task.first_row + row + r;
      const auto& mask = attention_.mask;
      mask_rows_[r] = mask_ + task.sequence->index * mask.stride(0) +
                      (task.key_head * group + at % group) * mask.stride(1) +
                      at / group * mask.stride(2) + key_begin;
    }
    return mask_rows_;
  }

  void update_largest(const RowsTask& task, int64_t row, int64_t rows, int64_t key_begin,
                      const TileColumns& columns, const int32_t* terms, const int32_t* products) {
    vectorized([&columns, &masks = mask_rows(task, row, rows, key_begin), rows, terms, products,
                flip = score_.falls() ? -1 : 0, result = largest_.data() + row] {
      for (int64_t r = 0; r < rows; ++r) {
        const int32_t* p = products + r * kKeyBlock;
        const uint8_t* mask = masks[r];
        const int64_t end = columns.row_end[r];
        int32_t largest = result[r];
        if (mask != nullptr) {
          for (int64_t j = columns.row_begin[r]; j < end; ++j) {
            const int32_t x = mask[j] == 0 ? (p[j] + terms[j]) ^ flip : kNoScore;
            largest = x > largest ? x : largest;
          }
        } else {
          for (int64_t j = columns.row_begin[r]; j < end; ++j) {
            const int32_t x = (p[j] + terms[j]) ^ flip;
            largest = x > largest ? x : largest;
          }
        }
        result[r] = largest;
      }
    });
  }

  // Turns products into exp(score - max) rounded to 8 bits, and into 0 where a row keeps no key.
  void exponentiate(const RowsTask& task, int64_t row, int64_t rows, int64_t key_begin,
                    const TileColumns& columns, const int32_t* terms, const int32_t* products) {
    const float quant = std::abs(quantization_.quant_scale1);
    const float limit = quantization_.quant_scale1 < 0 ? 128.0f : 127.0f;
    vectorized([=, &columns, &masks = mask_rows(task, row, rows, key_begin), score = score_,
                max = max() + row, sum = sum() + row, exponentials = exponentials_.data()] {
      for (int64_t r = 0; r < rows; ++r) {
        const int32_t* p = products + r * kKeyBlock;
        const uint8_t* mask = masks[r];
        uint8_t* to = exponentials + r * kKeyBlock;
        const int64_t begin = columns.row_begin[r];
        const int64_t end = columns.row_end[r];
        const float largest = max[r];
        // Loops of one width each: those that narrow to bytes as well vectorise badly.
        float x[kKeyBlock];
        for (int64_t j = begin; j < end; ++j) {
          x[j] = exponential_of_nonpositive(score(p[j] + terms[j]) - largest);
        }
        if (mask != nullptr) {
          for (int64_t j = begin; j < end; ++j) {
            x[j] = mask[j] == 0 ? x[j] : 0.0f;
          }
        }
        float total = 0;
#pragma omp simd reduction(+ : total)
        for (int64_t j = begin; j < end; ++j) {
          total += x[j];
        }
        sum[r] += total;
        for (int64_t j = columns.begin; j < begin; ++j) {
          to[j] = 0;
        }
        for (int64_t j = begin; j < end; ++j) {
          const float scaled = quant * x[j];
          const float bounded = scaled < limit ? scaled : limit;
          to[j] = static_cast<uint8_t>(std::bit_cast<uint32_t>(bounded + kRounder));
        }
        for (int64_t j = end; j < columns.end; ++j) {
          to[j] = 0;
        }
      }
    });
  }

  void flush(int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) {
      vectorized([from = sums_.row(r), to = out_.row(r), size = attention_.value_size] {
        for (int64_t d = 0; d < size; ++d) {
          to[d] += static_cast<float>(from[d]);
        }
      });
    }
  }

  void store(const RowsTask& task) {
    const auto& sequence = *task.sequence;
    const int64_t group = attention_.group();
    const HeadRows<Output> out(out_data_, out_tensor_, sequence.batch, task.key_head * group,
                               sequence.query_begin);
    const float deq =
        quantization_.quant_scale1 < 0 ? -quantization_.deq_scale2 : quantization_.deq_scale2;
    for (int64_t r = 0; r < task.rows; ++r) {
      const int64_t query = (task.first_row + r) / group;
      const int64_t head = (task.first_row + r) % group;
      auto* to = out.row(query, head);
      float* from = out_.row(r);
      const float total = sum()[r] == 0 ? 1.0f : sum()[r];
      vectorized([=, size = attention_.value_size] {
        for (int64_t d = 0; d < size; ++d) {
          from[d] = from[d] * deq / total;
        }
      });
      if constexpr (std::is_same_v<Output, at::Half>) {
        convert(from, to, attention_.value_size);
      }
    }
  }

  float* max() const { return statistics_.row(0); }
  float* sum() const { return statistics_.row(1); }

  const DenseAttention& attention_;
  const Quantization& quantization_;
  Score score_;
  const at::Tensor& out_tensor_;
  Output* out_data_;
  const uint8_t* mask_;
  KeyTile<int8_t> keys_;
  KeyTile<int8_t> values_;
  Tile<uint8_t> query_;
  Tile<int32_t> key_terms_;
  Tile<int32_t> products_;
  Tile<uint8_t> exponentials_;
  Tile<int32_t> sums_;
  Tile<float> out_;
  Tile<int32_t> largest_;
  Tile<float> statistics_;
  std::array<const uint8_t*, kRowBlock> mask_rows_{};
};

std::vector<RowsTask> divide(const DenseAttention& attention, int64_t max_rows) {
  int64_t all_rows = 0;
  for (const auto& sequence : attention.sequences) {
    all_rows += sequence.queries * attention.heads;
  }
  constexpr int64_t kTasksPerThread = 8;
  const int64_t share = all_rows / (kTasksPerThread * at::get_num_threads());
  const int64_t block = std::clamp(round_up(share, kRowBlock), kRowBlock, max_rows);
  std::vector<RowsTask> tasks;
  for (const auto& sequence : attention.sequences) {
    const int64_t rows = sequence.queries * attention.group();
    for (int64_t head = 0; head < attention.key_heads; ++head) {
      for (int64_t row = 0; row < rows; row += block) {
        const int64_t count = std::min(block, rows - row);
        const int64_t middle = (row + count / 2) / attention.group();
        const auto& kept = sequence.kept;
        tasks.push_back(
            {&sequence, head, row, count, count * (kept.end(middle) - kept.begin(middle))});
      }
    }
  }
  return tasks;
}

}  // namespace

void quantized_attention(const DenseAttention& attention, const Quantization& quantization,
                         const at::Tensor& out) {
  const auto run = [&]<typename Output>() {
    using Worker = QuantizedAttention<Output>;
    for_each_task(
        divide(attention, kMaxRows),
        [&] { return std::make_unique<Worker>(attention, quantization, out, kMaxRows); },
        [](Worker& worker, const RowsTask& task) { worker.run(task); });
  };
  out.scalar_type() == at::kChar ? run.template operator()<int8_t>()
                                 : run.template operator()<at::Half>();
}

}  // namespace ascend_attn::cpu
