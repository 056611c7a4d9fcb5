// The exact top k of a row of scores, in descending order.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

// Ties go to the lower index. NaN ranks above every number, as in torch.topk, so that it shows in
// the result instead of hiding.
template <typename Score>
class TopK {
 public:
  // For rows of at most `capacity` scores.
  explicit TopK(int64_t capacity) : ranks_(capacity) {}

  // Writes the indices of the best min(count, size) scores and returns their number.
  int64_t operator()(const Score* scores, int64_t size, int64_t count, int32_t* indices) {
    count = std::min(count, size);
    vectorized([=, ranks = ranks_.data()] {
      for (int64_t i = 0; i < size; ++i) {
        ranks[i] = rank(scores[i]);
      }
    });
    selected_.clear();
    if (count == size) {
      append_all(size);
    } else if (count > 0) {
      append_best(size, count);
    }
    sort();
    std::transform(selected_.begin(), selected_.end(), indices,
                   [](const Selected& selected) { return selected.index; });
    return count;
  }

 private:
  // A signed integer that orders like the scores.
  using Rank = std::conditional_t<sizeof(Score) == 8, int64_t, int32_t>;
  using Digits = std::make_unsigned_t<Rank>;
  static constexpr Rank kLowest = std::numeric_limits<Rank>::min();
  static constexpr Rank kHighest = std::numeric_limits<Rank>::max();

  struct Selected {
    Rank rank;
    int32_t index;
  };

  static Rank rank(Score score) {
    // Adding zero makes -0 equal to +0.
    const auto bits = std::bit_cast<Rank>(score + Score(0));
    const Rank ordered = bits < 0 ? bits ^ kHighest : bits;
    return score == score ? ordered : kHighest;
  }

  void append_all(int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
      selected_.push_back({ranks_[i], static_cast<int32_t>(i)});
    }
  }

  void append_best(int64_t size, int64_t count) {
    const auto threshold = rank_of_best(size, count);
    auto ties = count - count_if(size, [=](Rank rank) { return rank > threshold; });
    for (int64_t i = 0; i < size; ++i) {
      if (ranks_[i] > threshold || (ranks_[i] == threshold && ties-- > 0)) {
        selected_.push_back({ranks_[i], static_cast<int32_t>(i)});
      }
    }
  }

  // Returns the highest rank that `count` scores reach, found bit by bit from the top. Each step is
  // one branch-free pass of comparisons.
  Rank rank_of_best(int64_t size, int64_t count) const {
    Digits threshold = 0;
    for (auto bit = Digits(1) << (8 * sizeof(Rank) - 1); bit != 0; bit >>= 1) {
      const auto candidate = static_cast<Rank>((threshold | bit) ^ static_cast<Digits>(kLowest));
      if (count_if(size, [=](Rank rank) { return rank >= candidate; }) >= count) {
        threshold |= bit;
      }
    }
    return static_cast<Rank>(threshold ^ static_cast<Digits>(kLowest));
  }

  template <typename Predicate>
  int64_t count_if(int64_t size, Predicate predicate) const {
    int32_t result = 0;
    vectorized([=, &result, ranks = ranks_.data()] {
      int32_t count = 0;
      for (int64_t i = 0; i < size; ++i) {
        count += predicate(ranks[i]);
      }
      result = count;
    });
    return result;
  }

  // Descending radix sort from the lowest byte. It is stable and the indices ascend at first.
  void sort() {
    sorted_.resize(selected_.size());
    for (size_t shift = 0; shift < 8 * sizeof(Rank); shift += 8) {
      const auto bucket = [shift](Rank rank) {
        return static_cast<uint8_t>(
            ~((static_cast<Digits>(rank) ^ static_cast<Digits>(kLowest)) >> shift));
      };
      std::array<size_t, 256> next{};
      for (const auto& selected : selected_) {
        ++next[bucket(selected.rank)];
      }
      size_t begin = 0;
      for (auto& position : next) {
        begin += std::exchange(position, begin);
      }
      for (const auto& selected : selected_) {
        sorted_[next[bucket(selected.rank)]++] = selected;
      }
      selected_.swap(sorted_);
    }
  }

  std::vector<Rank> ranks_;
  std::vector<Selected> selected_;
  std::vector<Selected> sorted_;
};

}  // namespace ascend_attn::cpu
