// ScatterPaKvCache: writes new rows of key and value into a paged cache, in place.
#pragma once

#include <array>
#include <tuple>

#include "dispatch/arguments.h"

namespace ascend_attn {

struct OperatorLimits;

// Which rows of key and value are written, and where.
enum class Scatter {
  rows,          // row t to slot_mapping[t]
  nz_rows,       // the same, into a cache in fractal layout
  strided_rows,  // the same, with row t read from a wider buffer
  // One run of rows per batch and head; slot_mapping gives the slot of the first:
  alibi,  // the last compress_lens rows
  rope,   // all rows, with a window of compress_lens rows replaced by its mean
  omni    // all rows except that window
};
constexpr bool is_run(Scatter scatter) { return scatter >= Scatter::alibi; }

struct ScatterPaKvCache {
  static constexpr const char* name = "scatter_pa_kv_cache_";
  static constexpr bool takes_int64 = true;
  static constexpr const char* schema =
      "(Tensor key, Tensor(a!) key_cache, Tensor slot_mapping, Tensor? value=None, "
      "Tensor(b!)? value_cache=None, *, Tensor? compress_lens=None, "
      "Tensor? compress_seq_offset=None, Tensor? seq_lens=None, str cache_mode=\"Norm\", "
      "str scatter_mode=\"None\", int[2] strides=[1, 1], int[2] offsets=[0, 0]) -> ()";
  static constexpr std::array functions{"aclnnScatterPaKvCache"};
  static const OperatorLimits limits;
  static constexpr const char* no_gradient = "none flows through a cache";
  using Outputs = std::tuple<>;

  at::Tensor key, key_cache, slot_mapping;
  std::optional<at::Tensor> value, value_cache, compress_lens, compress_seq_offset, seq_lens;
  std::string_view cache_mode, scatter_mode;
  IntListField strides, offsets;

  Outputs check_and_allocate() const;
  void check_values() const;
  // Checks rules about memory, which fake tensors do not have. Every backend that writes calls it.
  void check_memory() const;

  // Returns the scenario that the arguments select; some devices ignore the modes.
  Scatter scatter() const;
  // Returns the axis of the caches that has block_size positions.
  int64_t block_size_axis(Scatter scatter) const {
    return scatter == Scatter::nz_rows ? key_cache.dim() - 2 : 1;
  }

  static constexpr int64_t kFractalBytes = 32;
};

}  // namespace ascend_attn
