// Whether a kernel must be deterministic: the same bits in every run.
#pragma once

#include <ATen/Context.h>

namespace ascend_attn {

// True if the operator's `deterministic` argument or torch.use_deterministic_algorithms asks for
// it.
inline bool is_deterministic(bool argument) {
  return argument || at::globalContext().deterministicAlgorithms();
}

}  // namespace ascend_attn
