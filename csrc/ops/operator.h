// How an operator meets the dispatcher.
//
// An operator is a struct of its arguments, in the order of its schema, with
//   static constexpr name            the schema's name
//   using Outputs, Signature         what the dispatcher sees; an operator that works in place has
//                                    the outputs std::tuple<>, the schema's ()
//   Outputs check_and_allocate()     every rule about shapes, dtypes and limits, and the outputs
// and each backend adds one function `compute(const Op&, Outputs&)`. The same check_and_allocate
// serves NPU, CPU and Meta: it uses symbolic sizes and allocates with the options of the inputs.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace ascend_attn {

template <typename Op, auto compute, typename Signature = typename Op::Signature>
struct Kernel;

template <typename Op, auto compute, typename... Args>
struct Kernel<Op, compute, typename Op::Outputs(Args...)> {
  static typename Op::Outputs call(Args... args) {
    const Op op{args...};
    auto outputs = op.check_and_allocate();
    compute(op, outputs);
    return outputs;
  }
};

// Registers the kernel of one operator for the backend of `library`.
template <typename Op, auto compute>
void register_kernel(torch::Library& library) {
  library.impl(Op::name, &Kernel<Op, compute>::call);
}

}  // namespace ascend_attn
