// Elementwise operations on a tile of scores between the two products: scale, pse, full mask,
// dropout.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "cpu/common/attention_tiles.h"
#include "cpu/common/dense_attention.h"
#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

template <typename Input, typename T>
class AttentionScores {
 public:
  explicit AttentionScores(const DenseAttention& attention) : attention_(attention) {}

  // Scores are still to be multiplied by this.
  T factor() const { return has_terms() ? T(1) : scale_; }
  bool has_factors() const { return drop_ || value_scale_; }

  // Turns the products q * k of a tile into scores, up to factor(); -inf where the mask excludes
  // the key.
  void finish(const ScoreTile& tile, int64_t first_head, const Matrix<T>& scores) const {
    if (has_terms()) {
      for_each_row(tile, first_head, scores, &AttentionScores::finish_row);
    }
  }

  // Multiplies weights, or their gradients, with what comes between the softmax and the values:
  // keep / keep_prob of dropout, or the scales of int8 values.
  void multiply_weights(const ScoreTile& tile, int64_t first_head, const Matrix<T>& values) const {
    if (has_factors()) {
      for_each_row(tile, first_head, values, &AttentionScores::multiply_row);
    }
  }

 private:
  using ChangeRow = void (AttentionScores::*)(const DenseSequence&, int64_t, int64_t, int64_t,
                                              int64_t, T*) const;

  // Changes the keys that each row keeps.
  void for_each_row(const ScoreTile& tile, int64_t first_head, const Matrix<T>& values,
                    ChangeRow change) const {
    tile.for_each_kept_row(first_head, [&](int64_t head, int64_t query, int64_t r) {
      (this->*change)(tile.sequence, head, query, tile.key_begin + tile.row_begin[r],
                      tile.key_begin + tile.row_end[r], values.row(r) + tile.row_begin[r]);
    });
  }

  bool has_terms() const { return pse_ || slopes_ || mask_ || key_scale_; }

  void finish_row(const DenseSequence& sequence, int64_t head, int64_t query, int64_t begin,
                  int64_t end, T* scores) const {
    if (key_scale_) {
      multiply(key_scale_ + sequence.index * attention_.key_scale.stride(0) + begin, end - begin,
               scores);
    }
    if (pse_) {
      add_tensor(pse_ + attention_.pse_address.row(sequence, head, query) + begin, end - begin,
                 scores);
    } else if (slopes_) {
      const T slope = slopes_[attention_.pse_address.row(sequence, head, 0)];
      add_slope(slope, begin - query + attention_.distance_shift, end - begin, scores);
    } else {
      scale(scores, scale_, scores, end - begin);
    }
    if (mask_) {
      apply_mask(mask_ + attention_.mask_row(sequence, head, query) + begin, end - begin, scores);
    }
  }

  void multiply_row(const DenseSequence& sequence, int64_t head, int64_t query, int64_t begin,
                    int64_t end, T* values) const {
    if (value_scale_) {
      multiply(value_scale_ + sequence.index * attention_.value_scale.stride(0) + begin,
               end - begin, values);
      return;
    }
    const int64_t first = attention_.heads * sequence.pairs_before +
                          (head * sequence.query_room + query) * sequence.key_room + begin;
    const T kept = T(1) / static_cast<T>(attention_.keep_prob);
    constexpr int64_t bits = 32;
    for (int64_t j = 0; j < end - begin; j += bits) {
      // The bits of up to 32 keys span at most five bytes.
      const int64_t byte = (first + j) / 8;
      uint64_t word = 0;
      std::memcpy(&word, drop_ + byte, std::min<int64_t>(5, drop_bytes_ - byte));
      word >>= (first + j) % 8;
      const int64_t count = std::min(bits, end - begin - j);
      vectorized([word = static_cast<uint32_t>(word), count, kept, values = values + j] {
        for (int64_t i = 0; i < count; ++i) {
          values[i] *= (word >> i) & 1 ? kept : T(0);
        }
      });
    }
  }

  static void multiply(const T* factors, int64_t count, T* numbers) {
    vectorized([=] {
      for (int64_t j = 0; j < count; ++j) {
        numbers[j] *= factors[j];
      }
    });
  }

  void add_tensor(const Input* pse, int64_t count, T* scores) const {
    vectorized([pse, count, scores, factor = scale_, inside = attention_.pse_type == 1] {
      if (inside) {
        for (int64_t j = 0; j < count; ++j) {
          scores[j] = (scores[j] + static_cast<T>(pse[j])) * factor;
        }
      } else {
        for (int64_t j = 0; j < count; ++j) {
          scores[j] = scores[j] * factor + static_cast<T>(pse[j]);
        }
      }
    });
  }

  void add_slope(T slope, int64_t distance, int64_t count, T* scores) const {
    const auto first = static_cast<T>(distance);
    vectorized([=, factor = scale_, root = attention_.pse_type == 3] {
      if (root) {
        for (int64_t j = 0; j < count; ++j) {
          scores[j] = scores[j] * factor -
                      slope * std::sqrt(std::abs(first + static_cast<T>(static_cast<int32_t>(j))));
        }
      } else {
        for (int64_t j = 0; j < count; ++j) {
          scores[j] = scores[j] * factor -
                      slope * std::abs(first + static_cast<T>(static_cast<int32_t>(j)));
        }
      }
    });
  }

  static void apply_mask(const uint8_t* mask, int64_t count, T* scores) {
    vectorized([=] {
      for (int64_t j = 0; j < count; ++j) {
        scores[j] = mask[j] == 0 ? scores[j] : -std::numeric_limits<T>::infinity();
      }
    });
  }

  static const T* data_of(const at::Tensor& tensor) {
    return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
  }

  const DenseAttention& attention_;
  T scale_ = static_cast<T>(attention_.scale);
  const Input* pse_ = attention_.pse.defined() && attention_.pse_type <= 1
                          ? attention_.pse.const_data_ptr<Input>()
                          : nullptr;
  const float* slopes_ = attention_.pse.defined() && attention_.pse_type >= 2
                             ? attention_.pse.const_data_ptr<float>()
                             : nullptr;
  const T* key_scale_ = data_of(attention_.key_scale);
  const T* value_scale_ = data_of(attention_.value_scale);
  const uint8_t* mask_ = bytes_of(attention_.mask);
  const uint8_t* drop_ = bytes_of(attention_.drop_mask);
  int64_t drop_bytes_ = drop_ ? attention_.drop_mask.numel() : 0;
};

}  // namespace ascend_attn::cpu
