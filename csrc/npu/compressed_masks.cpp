#include "npu/compressed_masks.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>

#include <map>
#include <mutex>
#include <utility>

#include "core/error.h"
#include "npu/kernel.h"

namespace ascend_attn::aclnn {
namespace {

constexpr int64_t kSize = kCompressedMaskSize;

at::Tensor made(int64_t prefix_rows, const at::TensorOptions& options) {
  const auto square = at::ones({kSize, kSize}, options.dtype(at::kBool)).triu(1);
  if (prefix_rows == 0) {
    return square;
  }
  const auto right_half = at::arange(kSize, options.dtype(at::kInt)).ge(kSize / 2);
  return at::cat({square, right_half.expand({prefix_rows, kSize})});
}

// Complete before any stream reads it: an event would cost each call a wait, and a capture cannot
// wait for one that was recorded before it.
at::Tensor made_for_all_streams(int64_t prefix_rows, const at::TensorOptions& options) {
  const c10::InferenceMode normal_tensor(false);
  const auto stream = c10_npu::getNPUStreamFromPool(options.device().index());
  const c10::StreamGuard guard(stream.unwrap());
  auto mask = made(prefix_rows, options);
  stream.synchronize();
  return mask;
}

}  // namespace

at::Tensor compressed_mask(const char* op, SparseMode mode, const at::TensorOptions& options) {
  using Masks = std::map<std::pair<c10::DeviceIndex, int64_t>, at::Tensor>;
  // Never destroyed: torch_npu may be gone by the end of the process.
  static auto* const masks = new Masks;
  static auto* const mutex = new std::mutex;
  const int64_t prefix_rows = mode == SparseMode::prefix_compressed ? kCompressedMaskPrefixRows : 0;
  const auto find = [&]() -> at::Tensor& {
    return (*masks)[{options.device().index(), prefix_rows}];
  };
  {
    const std::lock_guard lock(*mutex);
    if (const auto& mask = find(); mask.defined()) {
      return mask;
    }
  }
  if (is_capturing()) {
    check_implemented(GivenWorkspace::current() == nullptr, op, "atten_mask",
                      "expected a mask, or a call of this sparse_mode before the capture of one "
                      "whose lengths a graph updates, got None");
    return made(prefix_rows, options);
  }
  // A lock held here could wait for a thread that waits for this one, through Python's.
  auto mask = made_for_all_streams(prefix_rows, options);
  const std::lock_guard lock(*mutex);
  return find() = std::move(mask);
}

}  // namespace ascend_attn::aclnn
