// Operators by name, through PyTorch's dispatcher: the only way to those of ascend_attn_ops.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>

namespace cann_sim {

// Loads ascend_attn_ops if the process has not imported it.
std::optional<c10::OperatorHandle> find_operator(const std::string& name,
                                                 const std::string& overload = "");
// Raises if nobody has registered the operator.
c10::OperatorHandle operator_named(const std::string& name, const std::string& overload = "");

}  // namespace cann_sim
