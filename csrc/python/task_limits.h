// The limits of Python's tasks: `with ascend_attn_ops.limits(...)` sets a context variable, so that
// it holds for the asyncio task, or the thread, that entered the block.
#pragma once

#include <cstdint>
#include <utility>

namespace ascend_attn {

// What was in force where a block began: the overrides of the task and of the thread.
using LimitsBefore = std::pair<int64_t, int64_t>;

// Begins a block. The GIL is held.
LimitsBefore enter_limits(int64_t override);
// Ends a block that began with `of_task` and `of_thread` in force. The GIL is held.
void leave_limits(int64_t of_task, int64_t of_thread);

}  // namespace ascend_attn
