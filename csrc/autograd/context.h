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
  // `constants` gets the outputs that are marked as not differentiable.
  explicit AutogradContext(torch::autograd::AutogradContext& context,
                           variable_list* constants = nullptr)
      : context_(context), constants_(constants) {}

  void save_for_backward(variable_list tensors);
  variable_list get_saved_variables() const;
  // torch's own mark, which compiled autograd does not take, is for floating-point outputs alone.
  void mark_non_differentiable(const variable_list& outputs) { *constants_ = outputs; }
  // The value saved under a name; None before it is set.
  c10::IValue& saved_data(const std::string& name);

 private:
  torch::autograd::AutogradContext& context_;
  variable_list* constants_;
};

[[noreturn]] void raise_second_derivative(std::string_view op);

}  // namespace ascend_attn
