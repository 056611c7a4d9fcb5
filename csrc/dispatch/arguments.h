// The struct of an operator is the only list of its arguments in C++. The dispatcher signature, the
// arguments of a call and what autograd saves are all derived from its fields.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/OptionalArrayRef.h>

#include <cstddef>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core/layout.h"

namespace ascend_attn {

// Field types, named after the types of the schema.
using Tensor = const at::Tensor&;
using OptionalTensor = const std::optional<at::Tensor>&;
using TensorList = at::TensorList;
using SymInt = c10::SymInt;
using OptionalIntList = at::OptionalSymIntArrayRef;
using IntList = at::IntArrayRef;

namespace reflection {

struct Anything {
  template <typename T>
  operator T&() const;
  template <typename T>
  operator T&&() const;
};
template <size_t>
using AnythingAt = Anything;

template <typename T, size_t... index>
constexpr bool is_made_of(std::index_sequence<index...>) {
  return requires { T{AnythingAt<index>()...}; };
}

// Counts down, because an aggregate with reference members cannot be initialised from too few
// values: counting up would stop too early.
inline constexpr size_t kMostFields = 20;
template <typename T, size_t count = kMostFields>
constexpr size_t field_count() {
  static_assert(count > 0, "expected a struct of at most kMostFields fields");
  if constexpr (is_made_of<T>(std::make_index_sequence<count>())) {
    return count;
  } else {
    return field_count<T, count - 1>();
  }
}

template <typename T>
auto tie_fields(const T& arguments) {
  constexpr size_t count = field_count<T>();
  if constexpr (count == 1) {
    const auto& [a] = arguments;
    return std::tie(a);
  } else if constexpr (count == 2) {
    const auto& [a, b] = arguments;
    return std::tie(a, b);
  } else if constexpr (count == 3) {
    const auto& [a, b, c] = arguments;
    return std::tie(a, b, c);
  } else if constexpr (count == 4) {
    const auto& [a, b, c, d] = arguments;
    return std::tie(a, b, c, d);
  } else if constexpr (count == 5) {
    const auto& [a, b, c, d, e] = arguments;
    return std::tie(a, b, c, d, e);
  } else if constexpr (count == 6) {
    const auto& [a, b, c, d, e, f] = arguments;
    return std::tie(a, b, c, d, e, f);
  } else if constexpr (count == 7) {
    const auto& [a, b, c, d, e, f, g] = arguments;
    return std::tie(a, b, c, d, e, f, g);
  } else if constexpr (count == 8) {
    const auto& [a, b, c, d, e, f, g, h] = arguments;
    return std::tie(a, b, c, d, e, f, g, h);
  } else if constexpr (count == 9) {
    const auto& [a, b, c, d, e, f, g, h, i] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i);
  } else if constexpr (count == 10) {
    const auto& [a, b, c, d, e, f, g, h, i, j] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j);
  } else if constexpr (count == 11) {
    const auto& [a, b, c, d, e, f, g, h, i, j, k] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k);
  } else if constexpr (count == 12) {
    const auto& [a, b, c, d, e, f, g, h, i, j, k, l] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l);
  } else if constexpr (count == 13) {
    const auto& [a, b, c, d, e, f, g, h, i, j, k, l, m] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m);
  } else if constexpr (count == 14) {
    const auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, n);
  } else if constexpr (count == 15) {
    const auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o);
  } else if constexpr (count == 16) {
    const auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p);
  } else if constexpr (count == 17) {
    const auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q);
  } else if constexpr (count == 18) {
    const auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r);
  } else if constexpr (count == 19) {
    const auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s);
  } else if constexpr (count == 20) {
    const auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t);
  }
}

// A struct of arguments shared by several operators. It stands for its fields.
template <typename T>
concept ArgumentGroup = requires { T::is_argument_group; };

template <typename Field>
auto flatten(const Field& field) {
  if constexpr (ArgumentGroup<Field>) {
    return tie_fields(field);
  } else {
    return std::tie(field);
  }
}

// The struct that declares the fields: the operator itself, or the base that it inherits them from.
template <typename Op>
struct FieldsOf {
  using type = Op;
};
template <typename Op>
  requires requires { typename Op::Fields; }
struct FieldsOf<Op> {
  using type = typename Op::Fields;
};

// The type in which the dispatcher passes a field.
template <typename Field>
struct DispatcherType {
  using type = Field;
};
template <>
struct DispatcherType<at::Tensor> {
  using type = const at::Tensor&;
};
template <>
struct DispatcherType<std::optional<at::Tensor>> {
  using type = const std::optional<at::Tensor>&;
};
template <>
struct DispatcherType<LayoutArgument> {
  using type = std::string_view;
};
template <>
struct DispatcherType<KeyLayoutArgument> {
  using type = std::optional<std::string_view>;
};

template <typename Outputs, typename Tie>
struct Signature;
template <typename Outputs, typename... Fields>
struct Signature<Outputs, std::tuple<const Fields&...>> {
  using type = Outputs(typename DispatcherType<Fields>::type...);
};

template <typename Signature, typename Outputs>
struct OutSignature;
template <typename Outputs, typename... Args, typename... Tensors>
struct OutSignature<Outputs(Args...), std::tuple<Tensors...>> {
  using type = Outputs(Args..., const Tensors&...);
};

}  // namespace reflection

// Returns references to all arguments of a call, in schema order.
template <typename Op>
auto arguments_of(const Op& op) {
  using Fields = typename reflection::FieldsOf<Op>::type;
  return std::apply(
      [](const auto&... fields) { return std::tuple_cat(reflection::flatten(fields)...); },
      reflection::tie_fields<Fields>(op));
}

// The dispatcher signature of an operator.
template <typename Op>
using SignatureOf =
    typename reflection::Signature<typename Op::Outputs,
                                   decltype(arguments_of(std::declval<const Op&>()))>::type;
// That of its form `out`, which takes the outputs as well.
template <typename Op>
using OutSignatureOf =
    typename reflection::OutSignature<SignatureOf<Op>, typename Op::Outputs>::type;

}  // namespace ascend_attn
