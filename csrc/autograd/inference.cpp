// The Autograd kernel of operators without a gradient. Operators that work in place have their own.
#include <torch/library.h>

#include <tuple>

#include "dispatch/without_gradient.h"
#include "ops/operators.h"

namespace ascend_attn {
namespace {

template <typename Op>
concept HasNoGradient = requires { Op::no_gradient; };
template <typename Op>
concept WorksInPlace = std::tuple_size_v<typename Op::Outputs> == 0;

TORCH_LIBRARY_IMPL(ascend, Autograd, m) {
  Operators::for_each([&]<typename Op>() {
    if constexpr (HasNoGradient<Op> && !WorksInPlace<Op>) {
      register_function<Op, &infer<Op>>(m);
    }
  });
}

}  // namespace
}  // namespace ascend_attn
