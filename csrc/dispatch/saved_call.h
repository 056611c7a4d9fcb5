// Saves a call's arguments for its backward, and collects the gradients by argument.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "dispatch/arguments.h"

namespace ascend_attn {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace saved {

// Maps a field to a type that owns its value.
template <typename Field>
struct Owner {
  using type = Field;
};
template <>
struct Owner<at::TensorList> {
  using type = std::vector<at::Tensor>;
};
template <>
struct Owner<at::OptionalSymIntArrayRef> {
  using type = std::optional<std::vector<c10::SymInt>>;
};
template <>
struct Owner<LayoutArgument> {
  using type = std::string;
};
template <>
struct Owner<KeyLayoutArgument> {
  using type = std::optional<std::string>;
};
template <typename Tie>
struct Owners;
template <typename... Fields>
struct Owners<std::tuple<const Fields&...>> {
  using type = std::tuple<typename Owner<Fields>::type...>;
};

// Returns an owned value as the type of its field.
template <typename T>
const T& view(const T& value) {
  return value;
}
inline std::string_view view(const std::string& text) { return text; }
inline std::optional<std::string_view> view(const std::optional<std::string>& text) { return text; }
inline at::OptionalSymIntArrayRef view(const std::optional<std::vector<c10::SymInt>>& list) {
  return list ? at::OptionalSymIntArrayRef(*list) : std::nullopt;
}

struct Writer {
  variable_list tensors;
  std::vector<c10::IValue> values;

  void operator()(const at::Tensor& tensor) { tensors.push_back(tensor); }
  void operator()(const std::optional<at::Tensor>& tensor) {
    tensors.push_back(tensor.value_or(at::Tensor()));
  }
  void operator()(at::TensorList list) {
    values.emplace_back(static_cast<int64_t>(list.size()));
    tensors.insert(tensors.end(), list.begin(), list.end());
  }
  void operator()(const LayoutArgument& layout) { values.emplace_back(std::string(layout.text())); }
  void operator()(const KeyLayoutArgument& layout) {
    const auto& text = layout.text();
    values.push_back(text ? c10::IValue(std::string(*text)) : c10::IValue());
  }
  void operator()(const at::OptionalSymIntArrayRef& list) {
    values.push_back(list.has_value() ? c10::IValue(*list) : c10::IValue());
  }
  template <typename T>
  void operator()(const T& value) {
    values.emplace_back(value);
  }
};

// Reads back what Writer has written, in the same order.
struct Reader {
  variable_list::const_iterator tensor;
  std::vector<c10::IValue>::const_iterator value;

  void operator()(at::Tensor& to) { to = *tensor++; }
  void operator()(std::optional<at::Tensor>& to) {
    to = tensor->defined() ? std::optional(*tensor) : std::nullopt;
    ++tensor;
  }
  void operator()(std::vector<at::Tensor>& to) {
    const auto end = tensor + (value++)->toInt();
    to.assign(std::exchange(tensor, end), end);
  }
  void operator()(std::string& to) { to = (value++)->toStringRef(); }
  void operator()(std::optional<std::string>& to) {
    if (!value->isNone()) {
      to = value->toStringRef();
    }
    ++value;
  }
  void operator()(std::optional<std::vector<c10::SymInt>>& to) {
    if (!value->isNone()) {
      to = value->toSymIntVector();
    }
    ++value;
  }
  void operator()(c10::SymInt& to) { to = (value++)->toSymInt(); }
  void operator()(int64_t& to) { to = (value++)->toInt(); }
  void operator()(double& to) { to = (value++)->toDouble(); }
  void operator()(bool& to) { to = (value++)->toBool(); }
};

}  // namespace saved

// The forward call of `Op` that a backward belongs to.
template <typename Op>
class SavedCall {
 public:
  // Saves all arguments, and the outputs that the backward reads.
  static void save(AutogradContext* context, const Op& op, std::initializer_list<at::Tensor> kept) {
    saved::Writer writer;
    std::apply([&](const auto&... arguments) { (writer(arguments), ...); }, arguments_of(op));
    writer.tensors.insert(writer.tensors.end(), kept.begin(), kept.end());
    context->save_for_backward(std::move(writer.tensors));
    c10::impl::GenericList values(c10::AnyType::get());
    values.reserve(writer.values.size());
    for (auto& value : writer.values) {
      values.push_back(std::move(value));
    }
    context->saved_data["arguments"] = std::move(values);
  }

  explicit SavedCall(AutogradContext* context)
      : tensors_(context->get_saved_variables()),
        outputs_(tensors_.size()),
        owners_(read(context)),
        op_(std::apply([](const auto&... owner) { return Op{saved::view(owner)...}; }, owners_)) {}
  SavedCall(const SavedCall&) = delete;
  SavedCall& operator=(const SavedCall&) = delete;

  const Op& op() const { return op_; }
  // The saved outputs, in the order of `save`.
  const at::Tensor& output(size_t index) const { return tensors_[outputs_ + index]; }

 private:
  using Owners = typename saved::Owners<decltype(arguments_of(std::declval<const Op&>()))>::type;

  Owners read(AutogradContext* context) {
    Owners owners;
    const auto values = context->saved_data["arguments"].toListRef().vec();
    saved::Reader reader{tensors_.cbegin(), values.cbegin()};
    std::apply([&](auto&... owner) { (reader(owner), ...); }, owners);
    outputs_ = reader.tensor - tensors_.cbegin();
    return owners;
  }

  variable_list tensors_;
  size_t outputs_;
  Owners owners_;
  Op op_;
};

// The gradients of the arguments of `op`; most are undefined. Every tensor of a list counts as an
// argument of its own.
template <typename Op>
class Gradients {
 public:
  explicit Gradients(const Op& op) : arguments_(arguments_of(op)) {
    gradients_.resize(find(nullptr));
  }

  // The gradient of a field of `op`: gradients.of(op.query) = d_query.
  template <typename Argument>
  at::Tensor& of(const Argument& argument) {
    static_assert(!std::is_same_v<Argument, at::TensorList>, "set() takes the gradients of a list");
    const auto index = find(&argument);
    TORCH_INTERNAL_ASSERT(index < gradients_.size(), "no argument of the call");
    return gradients_[index];
  }
  // Sets the gradients of a list of tensors, in its order.
  void set(const at::TensorList& argument, at::TensorList gradients) {
    const auto first = find(&argument);
    TORCH_INTERNAL_ASSERT(
        gradients.size() == argument.size() && first + argument.size() <= gradients_.size(),
        "expected one gradient for each tensor of an argument of the call");
    std::copy(gradients.begin(), gradients.end(), gradients_.begin() + first);
  }

  operator variable_list() && { return std::move(gradients_); }

 private:
  // Finds a field by its address and returns its position; the number of positions if not found.
  size_t find(const void* argument) const {
    size_t position = 0;
    bool found = false;
    const auto visit = [&](const auto& field) {
      found = found || &field == argument;
      if (!found) {
        if constexpr (std::is_same_v<decltype(field), const at::TensorList&>) {
          position += field.size();
        } else {
          ++position;
        }
      }
    };
    std::apply([&](const auto&... fields) { (visit(fields), ...); }, arguments_);
    return position;
  }

  decltype(arguments_of(std::declval<const Op&>())) arguments_;
  variable_list gradients_;
};

}  // namespace ascend_attn
