// ScatterPaKvCache: writes new rows of key and value into a paged cache, in place.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace ascend_attn {

// Which rows of key and value are written, and where.
enum class Scatter {
  rows,          // row t to slot_mapping[t]
  nz_rows,       // the same, into a cache of fractal layout
  strided_rows,  // the same, row t read from a wider buffer
  // One run of rows for each batch and head, slot_mapping naming the first:
  alibi,  // the last compress_lens rows
  rope,   // all rows, a window of compress_lens of them replaced by its mean
  omni    // all rows but that window
};

struct ScatterPaKvCache {
  static constexpr const char* name = "scatter_pa_kv_cache_";
  static constexpr const char* no_gradient = "none flows through a cache";
  using Outputs = std::tuple<>;
  using Signature = Outputs(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                            const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                            const std::optional<at::Tensor>&, std::string_view, std::string_view,
                            at::IntArrayRef, at::IntArrayRef);

  const at::Tensor& key;
  const at::Tensor& key_cache;
  const at::Tensor& slot_mapping;
  const std::optional<at::Tensor>& value;
  const std::optional<at::Tensor>& value_cache;
  const std::optional<at::Tensor>& compress_lens;
  const std::optional<at::Tensor>& compress_seq_offset;
  const std::optional<at::Tensor>& seq_lens;
  std::string_view cache_mode;
  std::string_view scatter_mode;
  at::IntArrayRef strides;
  at::IntArrayRef offsets;

  Outputs check_and_allocate() const;
  // Rules about memory, which fake tensors do not have. Every backend that writes asks for them.
  void check_memory() const;

  // The scenario that arguments and product select; on Ascend 950 the modes have no effect.
  Scatter scatter() const;

  static constexpr int64_t kFractalBytes = 32;
};

}  // namespace ascend_attn
