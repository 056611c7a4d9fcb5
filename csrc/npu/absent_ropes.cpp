#include "npu/absent_ropes.h"

#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/accumulate.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "npu/capture.h"

namespace ascend_attn::aclnn {
namespace {

constexpr int64_t kRopeSize = 64;

// Returns zeros that every stream may read at once: the host waits for the fill, on a stream that
// has no other work. An event would cost each call a wait, and a capture cannot wait for one that
// was recorded before it.
at::Tensor filled(int64_t elements, const at::TensorOptions& options) {
  const c10::InferenceMode normal_tensor(false);
  const auto stream = c10_npu::getNPUStreamFromPool(options.device().index());
  const c10::StreamGuard guard(stream.unwrap());
  auto zeros = at::zeros({elements}, options);
  stream.synchronize();
  return zeros;
}

// The zeros of each device and dtype.
class Zeros {
 public:
  // Never destroyed: torch_npu may be gone by the end of the process.
  static Zeros& instance() {
    static auto* const zeros = new Zeros;
    return *zeros;
  }

  // Returns at least as many zeros. A captured call keeps the address of those that exist; memory
  // that a capture allocates belongs to its graph, whose replays fill it.
  at::Tensor get(int64_t elements, const at::TensorOptions& options) {
    const Key key{options.device().index(), c10::typeMetaToScalarType(options.dtype())};
    if (auto found = find(key, elements); found.defined()) {
      return found;
    }
    if (is_capturing()) {
      return at::zeros({elements}, options);
    }
    // A lock held here could wait for a thread that waits for this one, through Python's.
    const auto capacity = std::bit_ceil(static_cast<uint64_t>(elements));
    keep(key, filled(static_cast<int64_t>(capacity), options));
    return find(key, elements);
  }

 private:
  using Key = std::pair<c10::DeviceIndex, at::ScalarType>;

  at::Tensor find(const Key& key, int64_t elements) {
    const std::lock_guard lock(mutex_);
    const auto& kept = kept_[key];
    return kept.empty() || kept.back().numel() < elements ? at::Tensor() : kept.back();
  }
  void keep(const Key& key, at::Tensor zeros) {
    const std::lock_guard lock(mutex_);
    auto& kept = kept_[key];
    if (kept.empty() || kept.back().numel() < zeros.numel()) {
      kept.push_back(std::move(zeros));
    }
  }

  std::mutex mutex_;
  // In ascending size. Graphs and other streams may still read the smaller ones.
  std::map<Key, std::vector<at::Tensor>> kept_;
};

std::vector<int64_t> rope_sizes(const at::Tensor& beside) {
  auto sizes = beside.sizes().vec();
  sizes.back() = kRopeSize;
  return sizes;
}

}  // namespace

Ropes ropes_or_zeros(const at::Tensor& query, const at::Tensor& key,
                     const std::optional<at::Tensor>& query_rope,
                     const std::optional<at::Tensor>& key_rope) {
  if (query_rope) {
    return {*query_rope, *key_rope};
  }
  const auto query_sizes = rope_sizes(query);
  const auto key_sizes = rope_sizes(key);
  const int64_t query_count = c10::multiply_integers(query_sizes);
  const int64_t key_count = c10::multiply_integers(key_sizes);
  const auto zeros = Zeros::instance().get(std::max(query_count, key_count), query.options());
  return {zeros.narrow(0, 0, query_count).view(query_sizes),
          zeros.narrow(0, 0, key_count).view(key_sizes)};
}

}  // namespace ascend_attn::aclnn
