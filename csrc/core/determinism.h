// When a kernel must give the same bits in every run.
#pragma once

#include <ATen/Context.h>

namespace ascend_attn {

// The argument `deterministic` asks for it, or torch.use_deterministic_algorithms does.
inline bool is_deterministic(bool argument) {
  return argument || at::globalContext().deterministicAlgorithms();
}

}  // namespace ascend_attn
