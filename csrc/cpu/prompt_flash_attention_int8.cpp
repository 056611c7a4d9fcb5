// Makes two passes over the keys, because the exponentials are rounded to 8 bits relative to the
// maximum of the WHOLE row; an online softmax would round them relative to a running maximum. The
// first pass finds the maximum, the second rounds and multiplies.
#include <array>
#include <bit>
#include <memory>

#include "cpu/common/attention_rows.h"

namespace ascend_attn::cpu {
namespace {

// The memory in which all threads together, and each thread, keep the query-key products of the
// first pass for the second.
constexpr int64_t kKeptBytes = int64_t{2} << 20;
constexpr int64_t kKeptBytesOfThread = int64_t{1} << 20;
constexpr int64_t kTileBytes = kRowBlock * kKeyBlock * static_cast<int64_t>(sizeof(int32_t));
// Makes query unsigned, as tile_gemm requires of A.
constexpr int32_t kQueryOffset = 128;
// The number of products of exponential and value, each at most 128 * 128, that an int32 can sum:
// of whole blocks of keys.
constexpr int64_t kExactKeys = (int64_t{1} << 31) / (128 * 128) - kKeyBlock;

constexpr int32_t kNoScore = std::numeric_limits<int32_t>::min();
constexpr float kLargestHalf = 65504.0f;
// Adding it to a small number leaves the nearest integer in the low bits, with ties to even.
constexpr float kRounder = 12582912.0f;

// Rounds to the nearest half, ties to even, and returns it as a float. Values too large for a half
// stay finite.
inline float round_to_half(float x) {
  // Adding 1.5 * 2^13 times the power of two in x leaves 10 bits of x's fraction, as many as a half
  // has. Halves below 2^-14 have the same spacing as those just above.
  const float power = std::bit_cast<float>(std::bit_cast<uint32_t>(x) & uint32_t{0x7f800000});
  const float rounder = 12288.0f * (power > 0x1p-14f ? power : 0x1p-14f);
  return (x + rounder) - rounder;
}

// Converts an integer product to a score, in fp16: fp16(saturate(product * deq_scale1)) *
// fp16(scale).
struct Score {
  float deq_scale;
  float scale;

  float operator()(int32_t product) const {
    float x = static_cast<float>(product) * deq_scale;
    x = x > kLargestHalf ? kLargestHalf : x;
    x = x < -kLargestHalf ? -kLargestHalf : x;
    return round_to_half(round_to_half(x) * scale);
  }
  // Whether scores fall as the products grow.
  bool falls() const { return (deq_scale < 0) != (scale < 0); }
};

// The buffer sizes of a thread.
struct Capacity {
  explicit Capacity(const DenseAttention& attention) {
    int64_t most_rows = 1;
    int64_t most_keys = 1;
    for (const auto& sequence : attention.sequences) {
      most_rows = std::max(most_rows, sequence.queries * attention.group());
      most_keys = std::max(most_keys, sequence.keys);
    }
    const int64_t row_blocks = std::min(at::divup(most_rows, kRowBlock), kMaxRows / kRowBlock);
    const int64_t key_blocks = at::divup(most_keys, kKeyBlock);
    const int64_t kept = (kKeptBytes / at::get_num_threads() + kKeptBytesOfThread) / kTileBytes;
    // Otherwise the second pass computes the products again, which takes less time than packing the
    // keys for every block of rows, unless the products are slow.
    const bool keeps =
        std::min<int64_t>(row_blocks, has_int8_products() ? 2 : 1) * key_blocks <= kept;
    rows = kRowBlock * (keeps ? std::min(row_blocks, kept / key_blocks) : row_blocks);
    tiles = keeps ? rows / kRowBlock * key_blocks : 1;
  }

  int64_t rows;   // of a task, at most
  int64_t tiles;  // of products
};

class QuantizedAttention {
 public:
  QuantizedAttention(const DenseAttention& attention, const Int8Scales& scales,
                     const Capacity& capacity)
      : attention_(attention),
        scales_(scales),
        capacity_(capacity),
        score_{scales.deq_scale1, static_cast<at::Half>(static_cast<float>(attention.scale))} {}

  void run(const RowsTask& task, const OutputRows<at::Half, float>& outputs) {
    const auto& sequence = *task.sequence;
    const int64_t group = attention_.group();
    load_query(task);
    std::fill_n(largest_.data(), task.rows(), kNoScore);
    std::fill_n(sum(), task.rows(), 0.0f);
    zero_rows(out_, 0, task.rows());
    zero_rows(sums_, 0, task.rows());

    const auto key = key_rows<int8_t>(attention_.key, sequence, task.key_head);
    const auto value = key_rows<int8_t>(attention_.value, sequence, task.key_head);
    const int64_t row_blocks = at::divup(task.rows(), kRowBlock);
    const int64_t key_blocks = at::divup(task.end, kKeyBlock) - task.begin / kKeyBlock;
    const bool keeps = row_blocks * key_blocks <= capacity_.tiles;
    const auto for_each_block = [&](const auto& load, const auto& function) {
      int64_t index = 0;
      int64_t block = 0;
      for_each_key_block(task.begin, task.end, kKeyBlock, [&](int64_t begin, int64_t count) {
        int32_t* terms = key_terms_.row(keeps ? block++ : 0);
        load(begin, count, terms);
        for_each_tile(sequence, group, task.first_row, task.rows(), begin, count,
                      [&](const ScoreTile& tile) {
                        function(tile, tile.first_row - task.first_row, terms,
                                 products_.from(keeps ? kRowBlock * index++ : 0));
                      });
      });
    };
    for_each_block(
        [&](int64_t begin, int64_t count, int32_t* terms) { load_keys(key, begin, count, terms); },
        [&](const ScoreTile& tile, int64_t row, const int32_t* terms,
            const Matrix<int32_t>& products) {
          multiply(tile, row, products);
          update_largest(task, tile, row, terms, products.data());
        });
    for (int64_t r = 0; r < task.rows(); ++r) {
      const int32_t largest = largest_.data()[r];
      max()[r] = largest == kNoScore ? 0.0f : score_(score_.falls() ? ~largest : largest);
    }
    for_each_block(
        [&](int64_t begin, int64_t count, int32_t* terms) {
          if (!keeps) {
            load_keys(key, begin, count, terms);
          }
          values_.load(value, begin, count);
          if (begin > task.begin && begin % kExactKeys == 0) {
            add_up(task.rows());
          }
        },
        [&](const ScoreTile& tile, int64_t row, const int32_t* terms,
            const Matrix<int32_t>& products) {
          if (!keeps) {
            multiply(tile, row, products);
          }
          exponentiate(task, tile, row, terms, products.data());
          tile_gemm({product_rows(tile.rows), values_.size(), tile.width(),
                     exponentials_.from(0, tile.begin), values_.by_rows(tile.begin),
                     sums_.from(row), true});
        });
    add_up(task.rows());
    for (int64_t r = 0; r < task.rows(); ++r) {
      const int64_t row = task.first_row + r;
      outputs.store(sequence, task.key_head * group + row % group, row / group, finished(r));
    }
  }

 private:
  void load_query(const RowsTask& task) {
    const int64_t group = attention_.group();
    const auto rows = query_rows<int8_t>(attention_.query, *task.sequence, task.key_head * group);
    for (int64_t r = 0; r < task.rows(); ++r) {
      const int64_t at = task.first_row + r;
      vectorized(
          [from = rows.row(at / group, at % group), to = query_.row(r), size = attention_.size] {
            for (int64_t d = 0; d < size; ++d) {
              to[d] = static_cast<uint8_t>(from[d] + kQueryOffset);
            }
          });
    }
    zero_rows(query_, task.rows(), round_up(task.rows(), kRowStep));
  }

  void load_keys(const HeadRows<const int8_t>& rows, int64_t begin, int64_t count, int32_t* terms) {
    keys_.load(rows, begin, count);
    // Cancels what the offset of query adds to the products.
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

  void multiply(const ScoreTile& tile, int64_t row, const Matrix<int32_t>& products) {
    tile_gemm({product_rows(tile.rows), tile.width(), keys_.size(), query_.from(row),
               keys_.transposed(tile.begin), products.from(0, tile.begin), false});
  }

  // Returns the mask rows of a tile, or null pointers without a mask.
  const std::array<const uint8_t*, kRowBlock>& mask_rows(const RowsTask& task,
                                                         const ScoreTile& tile) {
    const int64_t group = attention_.group();
    for (int64_t r = 0; has_mask_ && r < tile.rows; ++r) {
      const int64_t at = tile.first_row + r;
      mask_rows_[r] =
          bytes_of(attention_.mask) + tile.key_begin +
          attention_.mask_row(tile.sequence, task.key_head * group + at % group, at / group);
    }
    return mask_rows_;
  }

  void update_largest(const RowsTask& task, const ScoreTile& columns, int64_t row,
                      const int32_t* terms, const int32_t* products) {
    vectorized([&columns, &masks = mask_rows(task, columns), rows = columns.rows, terms, products,
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

  // Turns products into exp(score - max) rounded to 8 bits, without the sign of quant_scale1.
  // Masked keys become 0, to which exp(-65504 - max) rounds in fp32.
  void exponentiate(const RowsTask& task, const ScoreTile& columns, int64_t row,
                    const int32_t* terms, const int32_t* products) {
    const float quant = std::abs(scales_.quant_scale1);
    const float limit = scales_.quant_scale1 < 0 ? 128.0f : 127.0f;
    vectorized([=, &columns, &masks = mask_rows(task, columns), rows = columns.rows, score = score_,
                max = max() + row, sum = sum() + row, exponentials = exponentials_.data()] {
      for (int64_t r = 0; r < rows; ++r) {
        const int32_t* p = products + r * kKeyBlock;
        const uint8_t* mask = masks[r];
        uint8_t* to = exponentials + r * kKeyBlock;
        const int64_t begin = columns.row_begin[r];
        const int64_t end = columns.row_end[r];
        const float largest = max[r];
        // One element width per loop: loops that also narrow to bytes vectorise badly.
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

  // Adds the int32 sums to the float accumulator; only the longest sequences need this more than
  // once.
  void add_up(int64_t rows) {
    vectorized([count = rows * sums_.stride(), from = sums_.data(), to = out_.data()] {
      for (int64_t i = 0; i < count; ++i) {
        to[i] += static_cast<float>(from[i]);
        from[i] = 0;
      }
    });
  }

  RowResult<float> finished(int64_t r) {
    if (largest_.data()[r] == kNoScore) {
      return {};
    }
    // A score beyond the range of fp16 is infinite, and inf - inf is NaN.
    const bool overflows = !(std::abs(max()[r]) <= kLargestHalf);
    // The exponentials were multiplied without the sign of quant_scale1.
    const float deq = scales_.quant_scale1 < 0 ? -scales_.deq_scale2 : scales_.deq_scale2;
    const float total = overflows ? std::numeric_limits<float>::quiet_NaN() : sum()[r];
    vectorized([=, out = out_.row(r), size = attention_.value_size] {
      for (int64_t d = 0; d < size; ++d) {
        out[d] = out[d] * deq / total;
      }
    });
    return {.out = out_.row(r), .sum = 1};
  }

  float* max() const { return statistics_.row(0); }
  float* sum() const { return statistics_.row(1); }

  const DenseAttention& attention_;
  const Int8Scales& scales_;
  Capacity capacity_;
  Score score_;
  bool has_mask_ = attention_.mask.defined();
  KeyTile<int8_t> keys_{attention_.size, /*by_rows=*/false, /*transposed=*/true};
  KeyTile<int8_t> values_{attention_.value_size, /*by_rows=*/true, /*transposed=*/false};
  Tile<uint8_t> query_{capacity_.rows, keys_.size()};
  Tile<int32_t> key_terms_{capacity_.tiles, kKeyBlock};
  Tile<int32_t> products_{capacity_.tiles * kRowBlock, kKeyBlock};
  Tile<uint8_t> exponentials_{kRowBlock, kKeyBlock};
  Tile<int32_t> sums_{capacity_.rows, values_.size()};
  Tile<float> out_{capacity_.rows, values_.size()};
  Tile<int32_t> largest_{1, capacity_.rows};
  Tile<float> statistics_{2, capacity_.rows};
  std::array<const uint8_t*, kRowBlock> mask_rows_{};
};

}  // namespace

void attend_int8(const DenseAttention& attention, const Int8Scales& scales,
                 const DenseOutputs& outputs) {
  const Capacity capacity(attention);
  const auto tasks = divide(attention, capacity.rows);
  const OutputRows<at::Half, float> rows(attention, outputs);
  for_each_task(
      tasks, [&] { return std::make_unique<QuantizedAttention>(attention, scales, capacity); },
      [&](QuantizedAttention& worker, const RowsTask& task) { worker.run(task, rows); });
}

}  // namespace ascend_attn::cpu
