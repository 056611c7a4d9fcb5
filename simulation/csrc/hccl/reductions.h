// The numbers that the simulated HCCL sends and reduces.
#pragma once

#include <hccl/hccl_types.h>

#include <cstddef>

namespace cann_sim {

// In bytes.
size_t size_of(HcclDataType dtype);

// Takes `count` numbers of the second buffer into the first.
using Reduction = void (*)(HcclReduceOp, void*, const void*, size_t count);

// Null for a dtype that an NPU does not reduce.
Reduction reduction_of(HcclDataType dtype);

}  // namespace cann_sim
