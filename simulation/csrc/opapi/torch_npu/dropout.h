#pragma once

#include <ATen/core/Tensor.h>

namespace cann_sim {

// The bits of a dropout that keeps elements with this probability: those of a byte from the lowest,
// 1 for what is kept. The same seed and offset give the same bits, as the backward expects; the
// device's own are others.
at::Tensor dropout_bits(int64_t seed, int64_t offset, double keep, int64_t bytes);

}  // namespace cann_sim
