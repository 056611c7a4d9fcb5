// The product of this process's NPU, and the version of its CANN.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/device.h"

namespace ascend_attn {

// Returns the name that aclrtGetSocName gives, such as "Ascend910B2".
std::string soc_name();

// Returns whose limits apply with a CANN of that version, such as "9.0.0.RC1": those of the newest
// version that is not newer. A text that is no version stands for the newest.
Cann cann_of_version(std::string_view version);
bool is_newer_than_known(std::string_view version);

// Returns what this process runs on, which the limits in force may differ from; nullopt for a SoC
// of none of the products.
std::optional<Device> device_of_process();

// Returns whether this process runs on one of these devices.
inline bool runs_on(Devices devices) {
  static const auto device = device_of_process();
  return device && devices.contain(*device);
}

// Returns the number of AI cores that the current stream may use; 0 where this CANN does not tell.
uint32_t ai_cores_of_stream();

}  // namespace ascend_attn
