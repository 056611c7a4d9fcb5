#include "core/sparse_mode.h"

namespace ascend_attn {
namespace {

KeptKeys band(int64_t keys, int64_t shift, int64_t pre_tokens, int64_t next_tokens) {
  return {keys, shift - KeptKeys::bounded(pre_tokens), shift + KeptKeys::bounded(next_tokens) + 1};
}

}  // namespace

KeptKeys kept_keys(SparseMode mode, int64_t queries, int64_t keys, int64_t pre_tokens,
                   int64_t next_tokens, int64_t prefix, bool is_band) {
  // The offset of the bottom-right anchor (last query, last key) from the top-left one.
  const int64_t shift = keys - queries;
  const KeptKeys left_up{keys, -KeptKeys::kUnbounded, 1};
  const KeptKeys right_down{keys, -KeptKeys::kUnbounded, shift + 1};
  switch (mode) {
    case SparseMode::standard:
      return band(keys, 0, pre_tokens, next_tokens);
    case SparseMode::all_mask:
      return {keys};
    case SparseMode::left_up_causal:
      return left_up;
    case SparseMode::right_down_causal:
      return right_down;
    case SparseMode::band:
      return band(keys, shift, pre_tokens, next_tokens);
    case SparseMode::prefix:
    case SparseMode::prefix_compressed:
      return {keys, right_down.from, right_down.until, prefix};
    case SparseMode::right_down_causal_band:
      return is_band ? band(keys, shift, pre_tokens, next_tokens) : right_down;
    case SparseMode::band_left_up_causal:
      return is_band ? band(keys, shift, pre_tokens, next_tokens) : left_up;
  }
  return {keys};
}

KeptKeys visible_keys(SparseMode mode, int64_t queries, int64_t keys) {
  return kept_keys(mode, queries, keys, KeptKeys::kUnbounded, KeptKeys::kUnbounded, /*prefix=*/0,
                   /*is_band=*/false);
}

KeptKeys visible_compressed_keys(SparseMode mode, int64_t queries, int64_t keys, int64_t ratio,
                                 int64_t residual) {
  auto visible = visible_keys(mode, queries, keys);
  if (mode == SparseMode::right_down_causal) {
    visible.until = keys * ratio + residual - queries + 1;
    visible.ratio = ratio;
  }
  return visible;
}

}  // namespace ascend_attn
