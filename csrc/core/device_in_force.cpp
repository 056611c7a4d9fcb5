#include "core/device_in_force.h"

#include <atomic>
#include <utility>

namespace ascend_attn {
namespace {

constexpr int64_t kNotSet = 0;
constexpr int64_t kOff = 1;
constexpr int64_t kFirstDevice = 2;
constexpr int64_t kCannStep = 256;

thread_local ThreadLimits thread_limits;
std::atomic<int64_t (*)()> override_of_task{nullptr};
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
  if (thread_limits.override != kLimitsOfTask) {
    return thread_limits.override;
  }
  auto* const read = override_of_task.load(std::memory_order_acquire);
  const auto of_task = read ? read() : kNotSet;
  return of_task == kNotSet ? default_limits.load(std::memory_order_relaxed) : of_task;
}
void set_limits_override_of_task(int64_t (*read)()) {
  override_of_task.store(read, std::memory_order_release);
}
ThreadLimits& limits_of_thread() { return thread_limits; }
ThreadLimits begin_limits_scope(int64_t override) {
  static std::atomic<uint64_t> scopes{0};
  return std::exchange(thread_limits, {override, override, 0, ++scopes});
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
