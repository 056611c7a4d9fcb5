// The struct of an operator is the only list of its arguments in C++. The dispatcher signature, the
// arguments of a call and what autograd saves are all derived from its fields.
//
// Fields are values, so that a call that resembles another one is a copy with other fields:
//   auto packed = op;
//   packed.query = packing.queries(op.query);
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/Exception.h>
#include <c10/util/MaybeOwned.h>
#include <c10/util/OptionalArrayRef.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/layout.h"
#include "core/lengths.h"
#include "core/tensor_checks.h"

namespace torch::autograd {
struct AutogradContext;
}

namespace ascend_attn {

using torch::autograd::AutogradContext;

// A list. It borrows the elements of a view, which must outlive it, and owns those of a vector.
template <typename Element>
class ListField {
 public:
  using View = at::ArrayRef<Element>;

  ListField(View view) : view_(view) {}
  ListField(std::vector<Element> elements)
      : elements_(std::make_shared<const std::vector<Element>>(std::move(elements))),
        view_(*elements_) {}

  operator View() const { return view_; }
  auto begin() const { return view_.begin(); }
  auto end() const { return view_.end(); }
  size_t size() const { return view_.size(); }
  bool empty() const { return view_.empty(); }
  const Element& operator[](size_t i) const { return view_[i]; }
  friend std::ostream& operator<<(std::ostream& out, const ListField& list) {
    return out << list.view_;
  }

 private:
  std::shared_ptr<const std::vector<Element>> elements_;  // null if borrowed
  View view_;
};
using TensorListField = ListField<at::Tensor>;
using IntListField = ListField<int64_t>;
class OptionalIntListField : public std::optional<ListField<c10::SymInt>> {
 public:
  using optional::optional;
  OptionalIntListField(at::OptionalSymIntArrayRef list) {
    if (list) {
      emplace(*list);
    }
  }
  operator at::OptionalSymIntArrayRef() const {
    return *this ? at::OptionalSymIntArrayRef(**this) : std::nullopt;
  }
};

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

// Counts down, because an aggregate cannot be initialised from too few values where a member has no
// default: counting up would stop too early.
inline constexpr size_t kMostFields = 21;
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
auto tie_fields(T& arguments) {
  constexpr size_t count = field_count<std::remove_const_t<T>>();
  if constexpr (count == 1) {
    auto& [a] = arguments;
    return std::tie(a);
  } else if constexpr (count == 2) {
    auto& [a, b] = arguments;
    return std::tie(a, b);
  } else if constexpr (count == 3) {
    auto& [a, b, c] = arguments;
    return std::tie(a, b, c);
  } else if constexpr (count == 4) {
    auto& [a, b, c, d] = arguments;
    return std::tie(a, b, c, d);
  } else if constexpr (count == 5) {
    auto& [a, b, c, d, e] = arguments;
    return std::tie(a, b, c, d, e);
  } else if constexpr (count == 6) {
    auto& [a, b, c, d, e, f] = arguments;
    return std::tie(a, b, c, d, e, f);
  } else if constexpr (count == 7) {
    auto& [a, b, c, d, e, f, g] = arguments;
    return std::tie(a, b, c, d, e, f, g);
  } else if constexpr (count == 8) {
    auto& [a, b, c, d, e, f, g, h] = arguments;
    return std::tie(a, b, c, d, e, f, g, h);
  } else if constexpr (count == 9) {
    auto& [a, b, c, d, e, f, g, h, i] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i);
  } else if constexpr (count == 10) {
    auto& [a, b, c, d, e, f, g, h, i, j] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j);
  } else if constexpr (count == 11) {
    auto& [a, b, c, d, e, f, g, h, i, j, k] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k);
  } else if constexpr (count == 12) {
    auto& [a, b, c, d, e, f, g, h, i, j, k, l] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l);
  } else if constexpr (count == 13) {
    auto& [a, b, c, d, e, f, g, h, i, j, k, l, m] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m);
  } else if constexpr (count == 14) {
    auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, n);
  } else if constexpr (count == 15) {
    auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o);
  } else if constexpr (count == 16) {
    auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p);
  } else if constexpr (count == 17) {
    auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q);
  } else if constexpr (count == 18) {
    auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r);
  } else if constexpr (count == 19) {
    auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s);
  } else if constexpr (count == 20) {
    auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t);
  } else if constexpr (count == 21) {
    auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u] = arguments;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u);
  }
}

// A struct of arguments shared by several operators. It stands for its fields.
template <typename T>
concept ArgumentGroup = requires { T::is_argument_group; };

template <typename Field>
auto flatten(Field& field) {
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
struct Parameter {
  using type = Field;
};
template <>
struct Parameter<at::Tensor> {
  using type = const at::Tensor&;
};
template <>
struct Parameter<std::optional<at::Tensor>> {
  using type = const std::optional<at::Tensor>&;
};
template <>
struct Parameter<Lengths> : Parameter<std::optional<at::Tensor>> {};
template <>
struct Parameter<DeviceLengths> : Parameter<std::optional<at::Tensor>> {};
template <typename Element>
struct Parameter<ListField<Element>> {
  using type = at::ArrayRef<Element>;
};
template <>
struct Parameter<OptionalIntListField> {
  using type = at::OptionalSymIntArrayRef;
};
template <>
struct Parameter<LayoutArgument> {
  using type = std::string_view;
};
template <>
struct Parameter<KeyLayoutArgument> {
  using type = std::optional<std::string_view>;
};

template <typename Outputs, typename Fields>
struct Signature;
template <typename... Outputs, typename... Fields>
struct Signature<std::tuple<Outputs...>, std::tuple<const Fields&...>> {
  using type = std::tuple<Outputs...>(typename Parameter<Fields>::type...);
  using out = std::tuple<Outputs...>(typename Parameter<Fields>::type..., const Outputs&...);
};

}  // namespace reflection

// Returns references to all arguments of a call, in schema order.
template <typename Op>
auto arguments_of(Op& op) {
  using Fields = typename reflection::FieldsOf<std::remove_const_t<Op>>::type;
  using Qualified = std::conditional_t<std::is_const_v<Op>, const Fields, Fields>;
  return std::apply([](auto&... fields) { return std::tuple_cat(reflection::flatten(fields)...); },
                    reflection::tie_fields<Qualified>(op));
}

template <typename Op>
using ArgumentsOf = decltype(arguments_of(std::declval<const Op&>()));
template <typename Op>
inline constexpr size_t kArgumentCount = std::tuple_size_v<ArgumentsOf<Op>>;

// The dispatcher signature of an operator, and that of its `out=` overload.
template <typename Op>
using SignatureOf = typename reflection::Signature<typename Op::Outputs, ArgumentsOf<Op>>::type;
template <typename Op>
using OutSignatureOf = typename reflection::Signature<typename Op::Outputs, ArgumentsOf<Op>>::out;

// Whether an operator reads lengths on the host, and whether it has any lengths.
template <typename Op>
inline constexpr bool kReadsLengths =
    []<typename... Fields>(std::type_identity<std::tuple<const Fields&...>>) {
      return (std::same_as<Fields, Lengths> || ...);
    }(std::type_identity<ArgumentsOf<Op>>());
template <typename Op>
inline constexpr bool kHasLengths =
    []<typename... Fields>(std::type_identity<std::tuple<const Fields&...>>) {
      return (std::derived_from<Fields, Lengths> || ...);
    }(std::type_identity<ArgumentsOf<Op>>());

// Returns a field as the dispatcher passes it.
template <typename Field>
typename reflection::Parameter<Field>::type as_parameter(const Field& field) {
  return field;
}

// Returns the position in the schema of a field of this very struct:
//   position_of(op, op.options.pse_shift)
template <typename Op, typename Field>
size_t position_of(const Op& op, const Field& field) {
  size_t position = 0;
  bool found = false;
  const auto visit = [&](const void* argument) {
    found = found || argument == &field;
    position += found ? 0 : 1;
  };
  std::apply([&](const auto&... arguments) { (visit(&arguments), ...); }, arguments_of(op));
  TORCH_INTERNAL_ASSERT(found, "expected a field of this call");
  return position;
}

// Where a tensor stands in a call: the position of the argument in the schema, and the index in it
// if it is a list.
struct Place {
  size_t position;
  int64_t index = kNotInList;
};

// Whether a field is a tensor or None.
template <typename Field>
concept OptionalTensor = std::derived_from<Field, std::optional<at::Tensor>>;

// Whether `predicate(tensor, place)` holds for any tensor of a call. Optional tensors that are None
// are left out.
template <typename Op, typename Predicate>
bool any_tensor(const Op& op, const Predicate& predicate) {
  size_t position = 0;
  const auto any = [&]<typename Field>(const Field& field) {
    const auto at = position++;
    if constexpr (std::same_as<Field, at::Tensor>) {
      return predicate(field, Place{at});
    } else if constexpr (OptionalTensor<Field>) {
      return field && field->defined() && predicate(*field, Place{at});
    } else if constexpr (std::same_as<Field, TensorListField>) {
      for (size_t index = 0; index < field.size(); ++index) {
        if (predicate(field[index], Place{at, static_cast<int64_t>(index)})) {
          return true;
        }
      }
    }
    return false;
  };
  return std::apply([&](const auto&... fields) { return (any(fields) || ...); }, arguments_of(op));
}

// Calls `visit(lengths, position)` for the lengths of a call.
template <typename Op, typename Visitor>
void for_each_lengths(const Op& op, const Visitor& visit) {
  size_t position = 0;
  const auto visit_field = [&]<typename Field>(const Field& field) {
    if constexpr (std::derived_from<Field, Lengths>) {
      visit(field, position);
    }
    ++position;
  };
  std::apply([&](const auto&... fields) { (visit_field(fields), ...); }, arguments_of(op));
}

template <typename Op, typename Visitor>
void for_each_tensor(const Op& op, const Visitor& visit) {
  any_tensor(op, [&](const at::Tensor& tensor, Place place) {
    visit(tensor, place);
    return false;
  });
}

// Returns the call with `map(field)` in place of every argument.
template <typename Op, typename Map>
Op map_fields(const Op& op, const Map& map) {
  return std::apply([&](const auto&... fields) { return Op{map(fields)...}; }, arguments_of(op));
}

// Returns the call with `map(tensor, place)` in place of every tensor.
template <typename Op, typename Map>
Op map_tensors(const Op& op, const Map& map) {
  size_t position = 0;
  const auto replace = [&]<typename Field>(const Field& field) -> Field {
    const auto at = position++;
    if constexpr (std::same_as<Field, at::Tensor>) {
      return map(field, Place{at});
    } else if constexpr (OptionalTensor<Field>) {
      return field && field->defined() ? Field(map(*field, Place{at})) : field;
    } else if constexpr (std::same_as<Field, TensorListField>) {
      std::vector<at::Tensor> tensors;
      for (const auto& tensor : field) {
        tensors.push_back(map(tensor, Place{at, static_cast<int64_t>(tensors.size())}));
      }
      return tensors;
    } else {
      return field;
    }
  };
  return map_fields(op, replace);
}

// A call whose tensors are those of the dispatcher's arguments, as c10::MaybeOwned borrows them:
// counting references would cost a small call several percent. Copies of the call own theirs.
template <typename Op>
class Borrowed {
 public:
  template <typename... Arguments>
  explicit Borrowed(const Arguments&... arguments) : op_{borrow(arguments)...} {}
  ~Borrowed() {
    std::apply([](auto&... fields) { (give_back(fields), ...); }, arguments_of(op_));
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  const Op& operator*() const { return op_; }

 private:
  using Traits = c10::MaybeOwnedTraits<at::Tensor>;

  static at::Tensor borrow(const at::Tensor& tensor) { return Traits::createBorrow(tensor); }
  static std::optional<at::Tensor> borrow(const std::optional<at::Tensor>& tensor) {
    return tensor ? std::optional(borrow(*tensor)) : std::nullopt;
  }
  template <typename Argument>
  static const Argument& borrow(const Argument& argument) {
    return argument;
  }

  static void give_back(at::Tensor& tensor) { Traits::destroyBorrow(tensor); }
  template <typename Field>
  static void give_back(Field& field) {
    if constexpr (OptionalTensor<Field>) {
      if (field) {
        give_back(*field);
      }
    }
  }

  Op op_;
};

}  // namespace ascend_attn
