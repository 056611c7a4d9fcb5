// The device in force: the one whose limits apply to the calls of this process, thread or task.
#pragma once

#include <cstdint>
#include <optional>

#include "core/device.h"

namespace ascend_attn {

// Returns the device whose limits apply to calls here, or nullopt while limits are off.
std::optional<Device> device_in_force();

// Returns whether limits are on, for one of these devices.
inline bool in_force(Devices devices) {
  const auto device = device_in_force();
  return device && devices.contain(*device);
}

// What overrides the limits of this process: 0 = nothing, 1 = limits off, otherwise a device. An
// integer, so that autograd can carry it from forward to backward.
int64_t limits_override();
// That of this thread, which a LimitsScope sets, comes before that of the task.
inline constexpr int64_t kLimitsOfTask = -1;
int64_t limits_override_of_thread();
void set_limits_override_of_thread(int64_t value);
// How to read the override of the task that calls; null while none has ever had one. A task is one
// of Python (PEP 567), and not of this library's core.
void set_limits_override_of_task(int64_t (*read)());
// Encodes a device, or nullopt for no limits, as an override value.
int64_t limits_override_for(std::optional<Device> device);

// Sets the override of this thread, and restores the previous one at the end of the scope.
class LimitsScope {
 public:
  explicit LimitsScope(int64_t value) : saved_(limits_override_of_thread()) {
    set_limits_override_of_thread(value);
  }
  ~LimitsScope() { set_limits_override_of_thread(saved_); }
  LimitsScope(const LimitsScope&) = delete;
  LimitsScope& operator=(const LimitsScope&) = delete;

 private:
  int64_t saved_;
};

// Sets what applies in this process where nothing overrides it: a device, or nullopt for no limits.
// Until then it is Atlas A2 with the newest CANN.
void set_default_limits(std::optional<Device> device);

}  // namespace ascend_attn
