// Saves a call's arguments for its backward, and collects the gradients by argument.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "core/memory.h"
#include "dispatch/arguments.h"

namespace ascend_attn {

using torch::autograd::variable_list;

[[noreturn]] void raise_second_derivative(std::string_view op);

namespace saved {

template <typename Field>
c10::IValue to_value(const Field& field) {
  return field;
}
inline c10::IValue to_value(const TensorListField& list) {
  return static_cast<int64_t>(list.size());
}
inline c10::IValue to_value(const LayoutArgument& layout) { return std::string(layout.text()); }
inline c10::IValue to_value(const KeyLayoutArgument& layout) {
  const auto& text = layout.text();
  return text ? c10::IValue(std::string(*text)) : c10::IValue();
}
inline c10::IValue to_value(const OptionalIntListField& list) {
  return list.has_value() ? c10::IValue(c10::SymIntArrayRef(*list)) : c10::IValue();
}

// Leaves out tensors that are an earlier one, and returns which is which, in pairs: a hook on saved
// tensors may make a new tensor of each, but a device wants the value of sparse attention to be its
// key.
inline std::vector<int64_t> without_repeats(variable_list& tensors) {
  std::vector<int64_t> repeats;
  for (size_t i = 1; i < tensors.size(); ++i) {
    for (size_t first = 0; tensors[i].defined() && first < i; ++first) {
      if (same_elements(tensors[i], tensors[first])) {
        tensors[i] = at::Tensor();
        repeats.insert(repeats.end(), {static_cast<int64_t>(i), static_cast<int64_t>(first)});
      }
    }
  }
  return repeats;
}
inline variable_list with_repeats(AutogradContext& context) {
  auto tensors = context.get_saved_variables();
  if (const auto& saved = context.saved_data["repeats"]; !saved.isNone()) {
    const auto repeats = saved.toIntVector();
    for (size_t i = 0; i < repeats.size(); i += 2) {
      tensors[repeats[i]] = tensors[repeats[i + 1]];
    }
  }
  return tensors;
}

// Reads fields in the order in which they were saved. Layouts refer to the texts of `values`.
struct Reader {
  variable_list::const_iterator tensor;
  c10::ArrayRef<c10::IValue>::const_iterator value;

  template <typename Field>
  Field read() {
    if constexpr (std::same_as<Field, at::Tensor>) {
      return *tensor++;
    } else if constexpr (OptionalTensor<Field>) {
      const auto& saved = *tensor++;
      return saved.defined() ? Field(saved) : Field();
    } else if constexpr (std::same_as<Field, TensorListField>) {
      const auto begin = std::exchange(tensor, tensor + (value++)->toInt());
      return variable_list(begin, tensor);
    } else if constexpr (std::same_as<Field, LayoutArgument>) {
      return std::string_view((value++)->toStringRef());
    } else if constexpr (std::same_as<Field, KeyLayoutArgument>) {
      const auto& text = *value++;
      return text.isNone() ? Field() : Field(std::string_view(text.toStringRef()));
    } else if constexpr (std::same_as<Field, OptionalIntListField>) {
      const auto& list = *value++;
      return list.isNone() ? Field(std::nullopt) : Field(list.toSymIntVector());
    } else {
      return (value++)->to<Field>();
    }
  }
};

}  // namespace saved

// The forward call of `Op` that a backward belongs to.
template <typename Op>
class SavedCall {
 public:
  // Saves all arguments, and the outputs that the backward reads.
  static void save(AutogradContext& context, const Op& op, std::initializer_list<at::Tensor> kept) {
    variable_list tensors;
    c10::impl::GenericList values(c10::AnyType::get());
    const auto save_field = [&]<typename Field>(const Field& field) {
      if constexpr (std::same_as<Field, at::Tensor>) {
        tensors.push_back(field);
      } else if constexpr (OptionalTensor<Field>) {
        tensors.push_back(field.value_or(at::Tensor()));
      } else {
        if constexpr (std::same_as<Field, TensorListField>) {
          tensors.insert(tensors.end(), field.begin(), field.end());
        }
        values.push_back(saved::to_value(field));
      }
    };
    std::apply([&](const auto&... fields) { (save_field(fields), ...); }, arguments_of(op));
    tensors.insert(tensors.end(), kept.begin(), kept.end());
    if (auto repeats = saved::without_repeats(tensors); !repeats.empty()) {
      context.saved_data["repeats"] = std::move(repeats);
    }
    context.save_for_backward(std::move(tensors));
    context.saved_data["arguments"] = std::move(values);
  }

  explicit SavedCall(AutogradContext& context)
      : tensors_(saved::with_repeats(context)),
        reader_{tensors_.cbegin(), context.saved_data["arguments"].toListRef().begin()},
        op_(read(std::type_identity<ArgumentsOf<Op>>())) {}
  SavedCall(const SavedCall&) = delete;
  SavedCall& operator=(const SavedCall&) = delete;

  const Op& op() const { return op_; }
  // The saved outputs, in the order of `save`.
  const at::Tensor& output(size_t index) const { return reader_.tensor[index]; }

 private:
  template <typename... Fields>
  Op read(std::type_identity<std::tuple<const Fields&...>>) {
    return Op{reader_.template read<Fields>()...};
  }

  variable_list tensors_;
  saved::Reader reader_;  // its texts are the context's
  Op op_;
};

// Returns none for an undefined gradient: nothing flows into that output.
inline std::optional<at::Tensor> if_defined(const at::Tensor& gradient) {
  return gradient.defined() ? std::optional(gradient) : std::nullopt;
}

// Returns undefined gradients for an operator without lists of tensors, and reads nothing that was
// saved. Torch drops those beyond the tensors of the call.
template <typename Op>
variable_list no_gradients() {
  return variable_list(kArgumentCount<Op>);
}

// Returns the gradients of the tensors of `op` that are given: `results` are those of `fields`, of
// a list if the field is one, and the other tensors have none.
template <typename Op, typename... Results, typename... Fields>
variable_list gradients_of(const Op& op, const std::tuple<Results...>& results,
                           const Fields&... fields) {
  static_assert(sizeof...(Results) == sizeof...(Fields));
  const std::array<size_t, sizeof...(Fields)> positions{position_of(op, fields)...};
  const auto of_fields =
      std::apply([](const auto&... each) { return std::array{variable_list{each}...}; }, results);
  variable_list gradients;
  for_each_tensor(op, [&](const at::Tensor&, Place place) {
    const auto* const found = std::ranges::find(positions, place.position);
    const auto index = static_cast<size_t>(std::max<int64_t>(place.index, 0));
    gradients.push_back(found == positions.end() ? at::Tensor()
                                                 : of_fields[found - positions.begin()].at(index));
  });
  return gradients;
}

}  // namespace ascend_attn
