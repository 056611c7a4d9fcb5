// The limits of Python's tasks: a context variable holds their `limits` blocks, so that a block is
// that of the asyncio task, or the thread, that entered it.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace ascend_attn {

// Begins a block of `owner`, which is in force until another one begins. The GIL is held.
void enter_limits(pybind11::handle owner, int64_t override);
// Ends the last block of `owner`. Blocks end in any order: those of suspended generators do. The
// GIL is held.
void leave_limits(pybind11::handle owner);

}  // namespace ascend_attn
