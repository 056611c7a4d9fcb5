// The context of a recorded call keeps what its backward reads.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <string_view>
#include <vector>

namespace torch::autograd {
struct AutogradContext;
}

namespace ascend_attn {

using variable_list = std::vector<at::Tensor>;

// Stands for torch::autograd::AutogradContext, whose header takes longer to parse than a gradient
// takes to compile: autograd/kernels.cpp alone includes it.
class AutogradContext {
 public:
  explicit AutogradContext(torch::autograd::AutogradContext& context) : context_(context) {}

  void save_for_backward(variable_list tensors);
  variable_list get_saved_variables() const;
  void mark_non_differentiable(const variable_list& outputs);
  // The value saved under a name; None before it is set.
  c10::IValue& saved_data(const std::string& name);

 private:
  torch::autograd::AutogradContext& context_;
};

[[noreturn]] void raise_second_derivative(std::string_view op);

}  // namespace ascend_attn
