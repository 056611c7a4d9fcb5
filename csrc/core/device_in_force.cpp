#include "core/device_in_force.h"

#include <atomic>

namespace ascend_attn {
namespace {

constexpr int64_t kNotSet = 0;
constexpr int64_t kOff = 1;
constexpr int64_t kFirstDevice = 2;
constexpr int64_t kCannStep = 256;

thread_local int64_t override_of_thread = kLimitsOfTask;
std::atomic<int64_t (*)()> override_of_task{nullptr};
std::atomic<int64_t> default_limits{limits_override_for(Device())};

}  // namespace

std::optional<Device> device_in_force() {
  auto value = limits_override();
  if (value == kNotSet) {
    value = default_limits.load(std::memory_order_relaxed);
  }
  if (value == kOff) {
    return std::nullopt;
  }
  const auto device = value - kFirstDevice;
  return Device{static_cast<Product>(device % kCannStep), static_cast<Cann>(device / kCannStep)};
}

int64_t limits_override() {
  if (override_of_thread != kLimitsOfTask) {
    return override_of_thread;
  }
  auto* const read = override_of_task.load(std::memory_order_acquire);
  return read ? read() : kNotSet;
}
int64_t limits_override_of_thread() { return override_of_thread; }
void set_limits_override_of_thread(int64_t value) { override_of_thread = value; }
void set_limits_override_of_task(int64_t (*read)()) {
  override_of_task.store(read, std::memory_order_release);
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
