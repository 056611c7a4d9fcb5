// The checked mode of the NPU: before a launch, the host waits for the device and checks the values
// that neither CANN nor the device checks. Wrong ones give NaN, wrong numbers or accesses out of
// bounds.
#pragma once

#include <atomic>

namespace ascend_attn {

// The number of callers that asked for the mode and have not left it. It counts for the whole
// process, because gradients run in other threads than their forwards.
extern std::atomic<int> value_check_requests;

inline bool checks_values() { return value_check_requests.load(std::memory_order_relaxed) != 0; }

}  // namespace ascend_attn
