// Large allocations are fresh memory of the kernel, whose page faults take a sixth of the time of a
// fast operator. Huge pages need 512 times fewer.
#pragma once

#include <cstddef>

namespace ascend_attn {

// Asks for huge pages where `bytes` is so large that glibc maps memory for this allocation alone,
// and unmaps it when it is freed. Does nothing elsewhere.
void prefer_huge_pages(void* memory, size_t bytes);

}  // namespace ascend_attn
