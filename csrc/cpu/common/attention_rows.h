// The forward pass of dense attention, shared by the operators.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "cpu/common/attention_tiles.h"
#include "cpu/common/dense_attention.h"
#include "cpu/common/parallel_tasks.h"
#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

// The number of rows that share one packed block of keys.
inline constexpr int64_t kMaxRows = 8 * kRowBlock;

inline constexpr int64_t kPartKeys = 8 * kKeyBlock;  // see attend_to_parts

// The maximum of a row without keys, in float64 too.
template <typename T>
inline constexpr T kLowest = static_cast<T>(std::numeric_limits<float>::lowest());

// Scale factors for the integer products of int8 inputs.
struct Int8Scales {
  float deq_scale1;    // scores = deq_scale1 * (q * k)
  float quant_scale1;  // probabilities in int8 = quant_scale1 * exp(score - max)
  float deq_scale2;    // outputs = deq_scale2 * (those * v); includes 1 / quant_scale1
};

// Rounds half to even and saturates.
inline int8_t to_int8(float x) {
  const float rounded = std::rint(x);
  return static_cast<int8_t>(rounded >= 127 ? 127.0f : rounded >= -128 ? rounded : -128.0f);
}

// Quantises an output: to_int8(half(x) * quant_scale2 + quant_offset2).
class OutputQuantization {
 public:
  // Each of the `channels` = N * D has a scale of its own, or all share one.
  OutputQuantization(const at::Tensor& scale, const std::optional<at::Tensor>& offset,
                     int64_t channels)
      : scale_(per_channel(scale, channels)),
        offset_(offset ? per_channel(*offset, channels) : scale.new_zeros({channels}, at::kFloat)) {
  }

  // Writes factor * from, the output of one head of `size` channels, to `to` in int8.
  template <typename T>
  void store(const T* from, T factor, int64_t head, int64_t size, int8_t* to) const {
    vectorized([=, scale = scale_.const_data_ptr<float>() + head * size,
                offset = offset_.const_data_ptr<float>() + head * size] {
      for (int64_t i = 0; i < size; ++i) {
        const auto rounded = static_cast<at::Half>(static_cast<float>(factor * from[i]));
        to[i] = to_int8(static_cast<float>(rounded) * scale[i] + offset[i]);
      }
    });
  }

 private:
  static at::Tensor per_channel(const at::Tensor& values, int64_t channels) {
    return values.to(at::kFloat).reshape({-1}).expand({channels}).contiguous();
  }

  at::Tensor scale_;
  at::Tensor offset_;
};

// The result of one row. The output is not yet divided by the sum, which is 0 without a key.
template <typename T>
struct RowResult {
  const T* out = nullptr;
  T max = kLowest<T>;
  T sum = 0;

  // Starts with the score of a key that has no value. Minus infinity is no sink.
  void start_with(T sink) {
    if (!(sink < kLowest<T>)) {
      max = sink;
      sum = 1;
    }
  }
};

// A task of attend_to_parts: rows of one key head, or all rows of neighbouring key heads.
struct RowsTask {
  const DenseSequence* sequence;
  int64_t key_head;
  int64_t key_heads;
  int64_t first_row;
  int64_t rows_of_head;
  int64_t begin;  // of the keys that any of the rows keeps
  int64_t end;
  int64_t cost;

  int64_t parts() const { return begin < end ? at::divup(end, kPartKeys) - begin / kPartKeys : 1; }
  int64_t rows() const { return key_heads * rows_of_head; }
  // Returns the query head of a row of the task.
  int64_t head(int64_t at, int64_t group) const {
    return (key_head + at / rows_of_head) * group + (first_row + at % rows_of_head) % group;
  }
};

// Where the results of a call go.
struct DenseOutputs {
  at::Tensor out;                                  // by head
  at::Tensor softmax_max, softmax_sum;             // undefined if the operator returns none
  std::optional<OutputQuantization> quantization;  // of an int8 `out`
  at::Tensor softmax_lse;                          // by head; undefined if it is not wanted
};

// Stores rows of `out`, in int8 or as Output, and their statistics.
template <typename Output, typename T>
class OutputRows {
 public:
  OutputRows(const DenseAttention& attention, const DenseOutputs& outputs)
      : attention_(attention), outputs_(outputs) {}

  void store(const DenseSequence& sequence, int64_t head, int64_t query,
             RowResult<T> result) const {
    // As on the device: the statistics of a sequence without keys know no sink.
    if (result.out == nullptr && sink_ != nullptr && (sequence.keys > 0 || lse_ != nullptr)) {
      result.start_with(sink_[head]);
    }
    const T factor = T(1) / result.sum;
    const int64_t size = attention_.value_size;
    const auto write = [&]<typename Element>(const auto& convert) {
      const HeadRows<Element> rows(static_cast<Element*>(data_), outputs_.out, sequence.batch, head,
                                   sequence.query_begin);
      if (result.out == nullptr || result.sum == 0) {
        std::fill_n(rows.row(query), size, Element(0));
      } else {
        convert(rows.row(query));
      }
    };
    if (outputs_.quantization) {
      write.template operator()<int8_t>(
          [&](int8_t* row) { outputs_.quantization->store(result.out, factor, head, size, row); });
    } else {
      write.template operator()<Output>([&](Output* row) { scale(result.out, factor, row, size); });
    }
    if (lse_ != nullptr) {
      const HeadRows<T> rows(lse_, outputs_.softmax_lse, sequence.batch, head,
                             sequence.query_begin);
      *rows.row(query) =
          result.sum == 0 ? -std::numeric_limits<T>::infinity() : result.max + std::log(result.sum);
    }
    if (max_ != nullptr) {
      // As on the device: a row without keys has a maximum and a sum, unless its sequence has none.
      const T lowest = sequence.keys > 0 ? kLowest<T> : T(0);
      const int64_t at = kStatisticsLanes * attention_.statistics_row(sequence, head, query);
      std::fill_n(max_ + at, kStatisticsLanes, result.sum == 0 ? lowest : result.max);
      std::fill_n(sum_ + at, kStatisticsLanes, result.sum == 0 ? -lowest : result.sum);
    }
  }

 private:
  static T* data_of(const at::Tensor& tensor) {
    return tensor.defined() ? tensor.mutable_data_ptr<T>() : nullptr;
  }

  const DenseAttention& attention_;
  const DenseOutputs& outputs_;
  void* data_ = outputs_.out.mutable_data_ptr();
  T* max_ = data_of(outputs_.softmax_max);
  T* sum_ = data_of(outputs_.softmax_sum);
  T* lse_ = data_of(outputs_.softmax_lse);
  const T* sink_ = attention_.sink.defined() ? attention_.sink.const_data_ptr<T>() : nullptr;
};

// Divides the rows into blocks of at most `most_rows`, small enough for every thread to get
// several. Tasks that read their keys in place have several key heads.
std::vector<RowsTask> divide(const DenseAttention& attention, int64_t most_rows = kMaxRows);

// Computes all rows of floating-point inputs.
void attend(const DenseAttention& attention, const DenseOutputs& outputs);
// The same for int8 inputs. Rows without keys are zero, in int8 too (not the offset).
void attend_int8(const DenseAttention& attention, const Int8Scales& scales,
                 const DenseOutputs& outputs);

}  // namespace ascend_attn::cpu
