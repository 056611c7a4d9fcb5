// Elementwise operations on a row of scores between the two products: scale, pse, full mask,
// dropout.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "cpu/common/dense_attention.h"
#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

template <typename Input, typename T>
class AttentionScores {
 public:
  explicit AttentionScores(const DenseAttention& attention)
      : attention_(attention),
        scale_(static_cast<T>(attention.scale)),
        has_tensor_(attention.pse.defined() && attention.pse_type <= 1),
        has_slopes_(attention.pse.defined() && attention.pse_type >= 2),
        pse_(has_tensor_ ? attention.pse.const_data_ptr<Input>() : nullptr),
        slopes_(has_slopes_ ? attention.pse.const_data_ptr<float>() : nullptr),
        mask_(attention.mask.defined()
                  ? static_cast<const uint8_t*>(attention.mask.const_data_ptr())
                  : nullptr),
        drop_(attention.drop_mask.defined() ? attention.drop_mask.const_data_ptr<uint8_t>()
                                            : nullptr),
        drop_bytes_(drop_ ? attention.drop_mask.numel() : 0) {}

  // Whether scores need more than factor(). If so, finish() applies the scale as well.
  bool has_terms() const { return pse_ || slopes_ || mask_; }
  bool has_dropout() const { return drop_; }
  T factor() const { return has_terms() ? T(1) : scale_; }

  // Turns the products q * k of keys [begin, end) of a row into scores, -inf where the mask
  // excludes the key.
  void finish(const DenseSequence& sequence, int64_t head, int64_t query, int64_t begin,
              int64_t end, T* scores) const {
    if (has_tensor_) {
      add_tensor(pse_ + attention_.pse_address.row(sequence, head, query) + begin, end - begin,
                 scores);
    } else if (has_slopes_) {
      const T slope = slopes_[attention_.pse_address.row(sequence, head, 0)];
      add_slope(slope, begin - query + attention_.distance_shift, end - begin, scores);
    } else {
      scale(scores, scale_, scores, end - begin);
    }
    if (mask_) {
      apply_mask(mask_ + attention_.mask_row(sequence, head, query) + begin, end - begin, scores);
    }
  }

  // Applies dropout to keys [begin, end) of a row: values *= keep / keep_prob.
  void drop(const DenseSequence& sequence, int64_t head, int64_t query, int64_t begin, int64_t end,
            T* values) const {
    const int64_t first = attention_.heads * sequence.pairs_before +
                          (head * sequence.queries + query) * sequence.keys + begin;
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

 private:
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

  const DenseAttention& attention_;
  T scale_;
  bool has_tensor_;
  bool has_slopes_;
  const Input* pse_;
  const float* slopes_;
  const uint8_t* mask_;
  const uint8_t* drop_;
  int64_t drop_bytes_;
};

}  // namespace ascend_attn::cpu
