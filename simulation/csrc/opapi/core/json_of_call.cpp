#include "opapi/core/json_of_call.h"

#include <cstdint>
#include <string>
#include <type_traits>
#include <variant>

#include "ascendcl/runtime.h"

namespace cann_sim {
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
