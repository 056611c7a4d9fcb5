// What Python asks of the build and of the run time.
#include <torch/extension.h>

#include "ops/error.h"
#include "ops/limits.h"

namespace ascend_attn {
namespace {

namespace py = pybind11;

py::list limits_of_operators() {
  py::list table;
  for (const auto& entry : limits_table()) {
    py::list products;
    for (const auto product : {Product::A2, Product::A3, Product::P950, Product::P310}) {
      if (entry.products & static_cast<uint8_t>(product)) {
        products.append(std::string(product_name(product)));
      }
    }
    const auto names = [](const std::vector<c10::ScalarType>& dtypes) {
      py::list list;
      for (const auto dtype : dtypes) {
        list.append(std::string(dtype_name(dtype)));
      }
      return list;
    };
    py::list limits;
    for (const auto& limit : entry.limits) {
      limits.append(py::make_tuple(std::string(limit.quantity), std::string(limit.meaning),
                                   limit.allowed.text()));
    }
    py::dict row;
    row["operator"] = std::string(entry.op);
    row["aclnn"] = std::string(entry.aclnn);
    row["products"] = products;
    row["dtypes"] = names(entry.dtypes);
    row["more_dtypes_950"] = names(entry.more_dtypes_950);
    row["limits"] = limits;
    table.append(row);
  }
  return table;
}

}  // namespace
}  // namespace ascend_attn

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace ascend_attn;
  m.def("limits_table", &limits_of_operators);
  m.def("limits_override", &limits_override);
  m.def("restore_limits", &set_limits_override);
  m.def("set_limits", [](std::optional<std::string> product) {
    set_limits_override(
        limits_override_for(product ? std::optional<Product>(product_of(*product)) : std::nullopt));
  });
  m.def("product_in_force", []() -> std::optional<std::string> {
    const auto product = product_in_force();
    return product ? std::optional<std::string>(product_name(*product)) : std::nullopt;
  });
}
