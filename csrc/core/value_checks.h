// The checked mode: before a call, the host checks the values that neither CANN nor the device
// checks, and waits for the device that has them. Wrong ones give NaN, wrong numbers or accesses
// out of bounds on an NPU.
#pragma once

#include <atomic>

namespace ascend_attn {

// The number of callers that asked for the mode and have not left it. It counts for the whole
// process, because gradients run in other threads than their forwards.
extern std::atomic<int> value_check_requests;

inline bool checks_values() { return value_check_requests.load(std::memory_order_relaxed) != 0; }

}  // namespace ascend_attn
