// The mask rule: which keys each query keeps in every sparse_mode. Kernels use it to skip tiles,
// and sparse_mode_mask in Python builds masks from it.
//
// All modes have the same form. With query i and key j counted within their sequence, row i keeps
// one interval of keys:
//   i + from <= j < max(i + until, prefix)
// Where a key stands for `ratio` tokens, as the compressed keys of DeepSeek-V4 do, the end counts
// tokens, and a key is kept with the last of its tokens.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ascend_attn {

// The values of sparse_mode.
enum class SparseMode : int64_t {
  standard = 0,                // a full mask within a band anchored top-left
  all_mask = 1,                // a full mask
  left_up_causal = 2,          // j <= i
  right_down_causal = 3,       // the last query sees the last key
  band = 4,                    // anchored bottom-right
  prefix = 5,                  // right_down_causal plus the first `prefix` keys
  prefix_compressed = 6,       // the same
  right_down_causal_band = 7,  // TND: band for the last non-empty sequence, others causal
  band_left_up_causal = 8      // TND: band for the first non-empty sequence, others causal
};
inline constexpr int64_t kLastSparseMode = 8;

struct KeptKeys {
  // Beyond any length, but small enough that sums with it do not overflow.
  static constexpr int64_t kUnbounded = int64_t{1} << 40;
  static int64_t bounded(int64_t tokens) { return std::clamp(tokens, -kUnbounded, kUnbounded); }

  int64_t keys = 0;
  int64_t from = -kUnbounded;
  int64_t until = kUnbounded;
  int64_t prefix = 0;
  int64_t ratio = 1;

  // Row i keeps [begin, end). Neither bound decreases with i.
  int64_t begin(int64_t i) const { return std::clamp<int64_t>(i + from, 0, keys); }
  int64_t end(int64_t i) const {
    return std::max(begin(i), std::clamp<int64_t>(std::max(i + until, prefix) / ratio, 0, keys));
  }
};

// Returns what a sequence of `queries` and `keys` tokens keeps. In modes 7 and 8, `is_band` marks
// the sequence that has the band.
KeptKeys kept_keys(SparseMode mode, int64_t queries, int64_t keys, int64_t pre_tokens,
                   int64_t next_tokens, int64_t prefix, bool is_band);

// The same for the sparse operators, which ignore pre_tokens and next_tokens.
KeptKeys visible_keys(SparseMode mode, int64_t queries, int64_t keys);
// The same where each key stands for `ratio` tokens, and no key for the last `residual` ones.
KeptKeys visible_compressed_keys(SparseMode mode, int64_t queries, int64_t keys, int64_t ratio,
                                 int64_t residual);

// Returns whether a mode takes a compressed mask, whose size does not depend on Sq and Skv. In mode
// 6 further rows follow for the prefix.
constexpr bool has_compressed_mask(SparseMode mode) {
  return mode != SparseMode::standard && mode != SparseMode::all_mask && mode != SparseMode::prefix;
}
inline constexpr int64_t kCompressedMaskSize = 2048;
inline constexpr int64_t kCompressedMaskPrefixRows = 1024;

}  // namespace ascend_attn
