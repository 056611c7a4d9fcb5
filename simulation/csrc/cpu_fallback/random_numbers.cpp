#include <ATen/CPUGeneratorImpl.h>
#include <torch_npu/csrc/aten/NPUGeneratorImpl.h>

#include <mutex>

#include "cpu_fallback/cpu_fallback.h"

namespace cann_sim {

RandomNumbers::RandomNumbers(at::Generator npu) {
  constexpr uint64_t kDrawn = 4;
  auto* generator = npu.get<at_npu::NPUGeneratorImpl>();
  const std::lock_guard lock(npu.mutex());
  const auto state = generator->philox_npu_state(kDrawn);
  if (state.captured_) {
    replayed_seed_ = state.seed_.ptr->const_data_ptr<int64_t>();
    replayed_offset_ = state.offset_.ptr->const_data_ptr<int64_t>();
    offset_ = state.offset_intragraph_;
  } else {
    seed_ = state.seed_.val;
    offset_ = state.offset_.val;
  }
}

at::Generator RandomNumbers::generator() const {
  const auto seed = replayed_seed_ ? static_cast<uint64_t>(*replayed_seed_) : seed_;
  const auto offset = offset_ + (replayed_offset_ ? static_cast<uint64_t>(*replayed_offset_) : 0);
  // Right after a seed the offset is 0, so the first numbers equal the CPU's after that seed.
  return at::detail::createCPUGenerator(seed + offset * 0x9E3779B97F4A7C15U);
}

}  // namespace cann_sim
