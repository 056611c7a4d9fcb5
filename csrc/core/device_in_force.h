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

// Returns the limits in force as an integer, so that autograd can carry them from forward to
// backward: 1 = limits off, otherwise a device.
int64_t limits_override();
// Sets how to read the override of the calling Python task (PEP 567), which this library's core
// knows nothing of; 0 = none. Until the first task has one, none is read.
void set_limits_override_of_task(int64_t (*read)());
// Encodes a device, or nullopt for no limits, as an override value.
int64_t limits_override_for(std::optional<Device> device);

// The override of a thread comes before that of its task: a backward pass has the limits of its
// forward. A block of the task that is entered on this thread, within the backward say, comes
// first.
inline constexpr int64_t kLimitsOfTask = -1;
struct ThreadLimits {
  int64_t override = kLimitsOfTask;
  int64_t without_blocks = kLimitsOfTask;  // the override when no such block is open
  int64_t open_blocks = 0;
  uint64_t scope = 0;  // its number, which no other scope has
};
ThreadLimits& limits_of_thread();
// Begins a scope of this thread, with no block in it, and returns what to restore at its end.
ThreadLimits begin_limits_scope(int64_t override);

// Sets the override of this thread, and restores the previous state at the end of the scope.
class LimitsScope {
 public:
  explicit LimitsScope(int64_t override) : saved_(begin_limits_scope(override)) {}
  ~LimitsScope() { limits_of_thread() = saved_; }
  LimitsScope(const LimitsScope&) = delete;
  LimitsScope& operator=(const LimitsScope&) = delete;

 private:
  ThreadLimits saved_;
};

// Sets what applies in this process where nothing overrides it: a device, or nullopt for no limits.
// Until then it is Atlas A2 with the newest CANN.
void set_default_limits(std::optional<Device> device);

}  // namespace ascend_attn
