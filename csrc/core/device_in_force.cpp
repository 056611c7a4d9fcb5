#include "core/device_in_force.h"

#include <utility>
#include <vector>

namespace ascend_attn {
namespace {

constexpr int64_t kNotSet = 0;
constexpr int64_t kOff = 1;
constexpr int64_t kFirstDevice = 2;
constexpr int64_t kCannStep = 256;

thread_local int64_t override_of_thread = kNotSet;
thread_local std::vector<std::shared_ptr<LimitsBlock>> blocks;  // the innermost is the last one
std::atomic<int64_t> default_limits{limits_override_for(Device())};

}  // namespace

std::optional<Device> device_in_force() {
  const auto value = limits_override();
  if (value == kOff) {
    return std::nullopt;
  }
  const auto device = value - kFirstDevice;
  return Device{static_cast<Product>(device % kCannStep), static_cast<Cann>(device / kCannStep)};
}

int64_t limits_override() {
  if (override_of_thread != kNotSet) {
    return override_of_thread;
  }
  while (!blocks.empty() && !blocks.back()->open) {
    blocks.pop_back();
  }
  return blocks.empty() ? default_limits.load(std::memory_order_relaxed) : blocks.back()->override;
}

std::shared_ptr<LimitsBlock> begin_limits_block(int64_t override) {
  return blocks.emplace_back(std::make_shared<LimitsBlock>(override));
}

int64_t set_override_of_thread(int64_t override) {
  return std::exchange(override_of_thread, override);
}

int64_t limits_override_for(std::optional<Device> device) {
  return device ? kFirstDevice + static_cast<int64_t>(device->product) +
                      kCannStep * static_cast<int64_t>(device->cann)
                : kOff;
}
void set_default_limits(std::optional<Device> device) {
  default_limits.store(limits_override_for(device));
}

}  // namespace ascend_attn
