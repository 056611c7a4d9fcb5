// The arguments of an aclnn function: handles, their values, and their declarations.
#include <ATen/ops/from_blob.h>
#include <c10/util/accumulate.h>

#include <algorithm>

#include "opapi/core/opapi.h"

namespace cann_sim {

at::ScalarType scalar_type(aclDataType dtype) {
  static const std::map<aclDataType, at::ScalarType> kTypes{{ACL_FLOAT, at::kFloat},
                                                            {ACL_FLOAT16, at::kHalf},
                                                            {ACL_BF16, at::kBFloat16},
                                                            {ACL_DOUBLE, at::kDouble},
                                                            {ACL_INT8, at::kChar},
                                                            {ACL_UINT8, at::kByte},
                                                            {ACL_INT32, at::kInt},
                                                            {ACL_INT64, at::kLong},
                                                            {ACL_INT16, at::kShort},
                                                            {ACL_UINT16, at::kUInt16},
                                                            {ACL_UINT32, at::kUInt32},
                                                            {ACL_UINT64, at::kUInt64},
                                                            {ACL_COMPLEX64, at::kComplexFloat},
                                                            {ACL_COMPLEX128, at::kComplexDouble},
                                                            {ACL_BOOL, at::kBool}};
  const auto found = kTypes.find(dtype);
  TORCH_CHECK(found != kTypes.end(), "the simulation has no dtype ", static_cast<int>(dtype));
  return found->second;
}

at::Tensor TensorView::tensor() const {
  // With all that lies around it: there are kernels that read more of the buffer than the view.
  const auto elements = c10::multiply_integers(storage_sizes);
  return at::from_blob(data, {elements}, at::TensorOptions().dtype(scalar_type(dtype)))
      .as_strided(sizes, strides, offset);
}

TensorView in_place_of(const TensorView& view, const at::Tensor& tensor) {
  return {tensor.sizes().vec(), tensor.strides().vec(), {tensor.numel()}, 0, view.dtype,
          view.format,          tensor.data_ptr()};
}

Value value_of(const aclTensor* tensor) { return tensor ? Value(tensor->view) : Value(nullptr); }
Value value_of(const aclTensorList* list) {
  if (!list) {
    return nullptr;
  }
  std::vector<TensorView> views;
  for (const auto* tensor : list->tensors) {
    views.push_back(tensor->view);
  }
  return views;
}
Value value_of(const aclIntArray* array) { return array ? Value(array->values) : Value(nullptr); }
Value value_of(const aclScalar* scalar) { return scalar ? Value(scalar->scalar) : Value(nullptr); }
Value value_of(const char* text) { return text ? Value(std::string(text)) : Value(nullptr); }

std::span<const TensorView> views_of(const Value& value) {
  if (const auto* view = std::get_if<TensorView>(&value)) {
    return {view, 1};
  }
  const auto* list = std::get_if<std::vector<TensorView>>(&value);
  return list ? std::span<const TensorView>(*list) : std::span<const TensorView>();
}

Value* Call::find_value(std::string_view name) const {
  const auto found = std::ranges::find(function_.arguments, name, &Argument::name);
  return found == function_.arguments.end() ? nullptr
                                            : &values_[found - function_.arguments.begin()];
}

std::optional<at::Tensor> Call::optional_tensor(std::string_view name) const {
  const auto* view = find<TensorView>(name);
  return view ? std::optional(view->tensor()) : std::nullopt;
}

at::Tensor Call::result_with(std::vector<std::pair<std::string_view, Value>> others) const {
  auto values = values_;
  const Call call(function_, values, launch_);
  for (auto& [name, other] : others) {
    *call.find_value(name) = std::move(other);
  }
  return call.results().at(0).toTensor();
}

std::vector<int64_t> Call::elements(std::string_view name) const {
  const auto tensor = get<TensorView>(name).tensor().to(at::kLong).contiguous();
  return {tensor.const_data_ptr<int64_t>(), tensor.const_data_ptr<int64_t>() + tensor.numel()};
}

at::Tensor rows_of_sequences(const Call& call, const at::Tensor& output, int64_t axis,
                             std::string_view layout, std::string_view ends) {
  const bool not_asked_for = output.numel() == 0;
  if (not_asked_for || !call.is_tnd(layout)) {
    return output;
  }
  const auto values = call.elements(ends);
  return output.narrow(axis, 0, values.empty() ? 0 : values.back());
}

namespace {

std::string dtype_name(aclDataType dtype) { return c10::str(scalar_type(dtype)); }

Json json_of(const TensorView& view) {
  return Json::object({{"dtype", dtype_name(view.dtype)},
                       {"sizes", Json::array(view.sizes)},
                       {"strides", Json::array(view.strides)},
                       {"offset", view.offset},
                       {"storage_sizes", Json::array(view.storage_sizes)},
                       {"format", int64_t{view.format}},
                       {"device", int64_t{device_of_address(view.data)}},
                       {"address", reinterpret_cast<int64_t>(view.data)}});
}

Json json_of(const Value& value) {
  return std::visit(
      [](const auto& held) -> Json {
        using Held = std::decay_t<decltype(held)>;
        if constexpr (std::is_same_v<Held, TensorView>) {
          return json_of(held);
        } else if constexpr (std::is_same_v<Held, std::vector<TensorView>>) {
          std::vector<Json> items;
          for (const auto& view : held) {
            items.push_back(json_of(view));
          }
          return Json::array(items);
        } else if constexpr (std::is_same_v<Held, Scalar>) {
          return Json::object({{"dtype", dtype_name(held.dtype)}, {"value", held.value}});
        } else if constexpr (std::is_same_v<Held, std::vector<int64_t>>) {
          return Json::array(held);
        } else {
          return held;
        }
      },
      value);
}

}  // namespace

Json json_of(const Function& function, const std::vector<Value>& values) {
  Json arguments = Json::object({});
  for (size_t i = 0; i < values.size(); ++i) {
    arguments.add(function.arguments.at(i).name, json_of(values[i]));
  }
  return arguments;
}

}  // namespace cann_sim

using namespace cann_sim;

namespace {

template <typename Handle, typename... Arguments>
Handle* made(const char* maker, Arguments... arguments) {
  return gives_no_handle(maker) ? nullptr : new Handle({std::move(arguments)...});
}

}  // namespace

extern "C" {

aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dimensions, aclDataType dtype,
                           const int64_t* strides, int64_t offset, aclFormat format,
                           const int64_t* storage_sizes, uint64_t storage_dimensions, void* data) {
  using Sizes = std::vector<int64_t>;
  return made<aclTensor>(
      "aclCreateTensor", Sizes(sizes, sizes + dimensions), Sizes(strides, strides + dimensions),
      Sizes(storage_sizes, storage_sizes + storage_dimensions), offset, dtype, format, data);
}
int aclDestroyTensor(const aclTensor* tensor) {
  delete tensor;
  return ACL_SUCCESS;
}
aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, uint64_t size) {
  return made<aclTensorList>("aclCreateTensorList", tensors, tensors + size);
}
int aclDestroyTensorList(const aclTensorList* list) {
  delete list;
  return ACL_SUCCESS;
}
aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t size) {
  return made<aclIntArray>("aclCreateIntArray", values, values + size);
}
int aclDestroyIntArray(const aclIntArray* array) {
  delete array;
  return ACL_SUCCESS;
}
aclScalar* aclCreateScalar(void* value, aclDataType dtype) {
  const auto tensor = at::from_blob(value, {}, at::TensorOptions().dtype(scalar_type(dtype)));
  return new aclScalar({tensor.item().toDouble(), dtype});
}
int aclDestroyScalar(const aclScalar* scalar) {
  delete scalar;
  return ACL_SUCCESS;
}

}  // extern "C"
