// The form `out` of the operators that have one: which tensors it may write to, and what
// torch.compile makes of it.
#include <ATen/FunctionalTensorWrapper.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "dispatch/operator_function.h"
#include "ops/operators.h"

namespace ascend_attn {
namespace {

template <typename Op, typename Signature = SignatureOf<Op>,
          typename Outputs = typename Op::Outputs>
struct OutForm;

template <typename Op, typename... Args, typename... Tensors>
struct OutForm<Op, typename Op::Outputs(Args...), std::tuple<Tensors...>> {
  using Outputs = typename Op::Outputs;

  static Outputs without_gradient(Args... args, const Tensors&... outputs) {
    check_no_tangent<Op>(args..., outputs...);
    check_no_gradient<Op>(reason(), args..., outputs...);
    return write(args..., outputs...);
  }

  // Inference mode, and calls with nothing but its tensors, come here without the check above.
  static Outputs write(Args... args, const Tensors&... outputs) {
    size_t index = 0;
    const auto check = [&](const at::Tensor& output) {
      check_version(Op::name, [&] { return output_name(Op::name, index); }, output);
      ++index;
    };
    (check(outputs), ...);
    auto written = [&] {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      return call_out<Op>(args..., outputs...);
    }();
    (bump_version(outputs), ...);
    return written;
  }

  // Traces write to nothing: they have a call that returns new tensors, which take the place of the
  // given ones until the trace ends. The compiler then copies, or writes where they are.
  static Outputs functionalized(Args... args, const Tensors&... outputs) {
    check_tensors_given(Op::name, args..., outputs...);
    if (!(is_traced(outputs) && ...)) {
      // Traced values cannot be written to tensors that are none.
      check_implemented(!(is_traced(args) || ...) && !(is_traced(outputs) || ...), Op::name,
                        output_name(Op::name, 0),
                        "expected all outputs to be traced by functionalization, got one that is "
                        "not beside tensors that are");
      const at::AutoDispatchSkipFunctionalize below_functionalization;
      return call_out<Op>(args..., outputs...);
    }
    const auto results = [&] {
      (at::functionalization::impl::sync(outputs), ...);
      const at::AutoDispatchSkipFunctionalize below_functionalization;
      return call<Op>(untraced(args)...);
    }();
    const std::array given{&outputs...};
    OutputSource source(Op::name, given.data());
    const WrittenMemory written(Op::name, given.data(), given.size());
    size_t position = 0;
    (written.check_apart(position++, args), ...);
    std::apply(
        [&](const auto&... result) {
          (source.tensor(result.sym_sizes(), result.options()), ...);
          (replace(outputs, result), ...);
        },
        results);
    return {outputs...};
  }

  static Outputs of_negated_views(Args... args, const Tensors&... outputs) {
    check_tensors_given(Op::name, args..., outputs...);
    size_t index = 0;
    (check_not_negated(Op::name, output_name(Op::name, index++), outputs), ...);
    return call_out<Op>(without_negation(args)..., outputs...);
  }

 private:
  static constexpr const char* reason() {
    if constexpr (requires { Op::no_gradient; }) {
      return Op::no_gradient;
    } else {
      return "nothing differentiates a call that writes to given tensors";
    }
  }

  static bool is_traced(const at::Tensor& tensor) {
    return at::functionalization::impl::isFunctionalTensor(tensor);
  }
  static bool is_traced(const std::optional<at::Tensor>& tensor) {
    return tensor && is_traced(*tensor);
  }
  static bool is_traced(at::TensorList tensors) {
    return std::ranges::any_of(tensors, [](const at::Tensor& tensor) { return is_traced(tensor); });
  }
  template <typename T>
  static bool is_traced(const T&) {
    return false;
  }

  // What a traced tensor stands for at this point of the trace.
  static at::Tensor untraced(const at::Tensor& tensor) {
    at::functionalization::impl::sync(tensor);
    return at::functionalization::impl::from_functional_tensor(tensor,
                                                               /*assert_functional=*/false);
  }
  static std::optional<at::Tensor> untraced(const std::optional<at::Tensor>& tensor) {
    return tensor ? std::optional(untraced(*tensor)) : std::nullopt;
  }
  static std::vector<at::Tensor> untraced(at::TensorList tensors) {
    std::vector<at::Tensor> all;
    for (const auto& tensor : tensors) {
      all.push_back(untraced(tensor));
    }
    return all;
  }
  template <typename T>
  static const T& untraced(const T& argument) {
    return argument;
  }

  static void replace(const at::Tensor& output, const at::Tensor& result) {
    at::functionalization::impl::replace_(output, result);
    at::functionalization::impl::commit_update(output);
    at::functionalization::impl::sync(output);
  }
};

// Registers a kernel of every operator that has the form.
template <typename Register, typename... Ops>
void for_each_form(OperatorList<Ops...>, const Register& register_one) {
  const auto add = [&]<typename Op>(std::type_identity<Op>) {
    if constexpr (HasOutForm<Op>) {
      register_one(std::type_identity<Op>());
    }
  };
  (add(std::type_identity<Ops>()), ...);
}

TORCH_LIBRARY_IMPL(ascend, Autograd, m) {
  for_each_form(Operators(), [&]<typename Op>(std::type_identity<Op>) {
    register_out<Op>(m, &OutForm<Op>::without_gradient);
  });
}

TORCH_LIBRARY_IMPL(ascend, ADInplaceOrView, m) {
  for_each_form(Operators(), [&]<typename Op>(std::type_identity<Op>) {
    register_out<Op>(m, &OutForm<Op>::write);
  });
}

TORCH_LIBRARY_IMPL(ascend, Negative, m) {
  for_each_form(Operators(), [&]<typename Op>(std::type_identity<Op>) {
    register_out<Op>(m, &OutForm<Op>::of_negated_views);
  });
}

TORCH_LIBRARY_IMPL(ascend, Functionalize, m) {
  for_each_form(Operators(), [&]<typename Op>(std::type_identity<Op>) {
    register_out<Op>(m, &OutForm<Op>::functionalized);
  });
}

}  // namespace
}  // namespace ascend_attn
