// The device in force: the one whose limits apply to the calls of this process or thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>

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
// Encodes a device, or nullopt for no limits, as an override value.
int64_t limits_override_for(std::optional<Device> device);

// Limits of the thread that began it. Blocks end in any order, and on any thread: those of
// suspended generators do. The last one that is open applies.
struct LimitsBlock {
  explicit LimitsBlock(int64_t override) : override(override) {}

  bool is_of_this_thread() const { return thread == std::this_thread::get_id(); }
  void end() { open = false; }

  const int64_t override;
  const std::thread::id thread = std::this_thread::get_id();
  std::atomic<bool> open = true;
};
std::shared_ptr<LimitsBlock> begin_limits_block(int64_t override);

// A block that ends with its scope: a backward pass has the limits of its forward.
class LimitsScope {
 public:
  explicit LimitsScope(int64_t override) : block_(begin_limits_block(override)) {}
  ~LimitsScope() { block_->end(); }
  LimitsScope(const LimitsScope&) = delete;
  LimitsScope& operator=(const LimitsScope&) = delete;

 private:
  std::shared_ptr<LimitsBlock> block_;
};

// Sets what comes before all blocks of this thread, 0 for nothing, and returns what did.
int64_t set_override_of_thread(int64_t override);

// Sets what applies in this process where nothing overrides it: a device, or nullopt for no limits.
// Until then it is Atlas A2 with the newest CANN.
void set_default_limits(std::optional<Device> device);

}  // namespace ascend_attn
