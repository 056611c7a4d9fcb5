// What Python asks of the build and of the run time.
#include <torch/extension.h>

#include <type_traits>
#include <utility>
#include <vector>

#include "core/attention_mask.h"
#include "core/error.h"
#include "core/limits.h"
#include "ops/operators.h"
#include "python/direct_call.h"

namespace ascend_attn {
namespace {

namespace py = pybind11;

py::dict limits_of(const ProductLimits& variant) {
  py::list products;
  for (const auto product : {Product::A2, Product::A3, Product::P950, Product::P310}) {
    if (variant.products & static_cast<uint8_t>(product)) {
      products.append(std::string(product_name(product)));
    }
  }
  py::list dtypes;
  for (const auto dtype : variant.dtypes) {
    dtypes.append(std::string(dtype_name(dtype)));
  }
  py::list limits;
  for (const auto& limit : variant.limits) {
    limits.append(py::make_tuple(std::string(limit.quantity), std::string(limit.meaning),
                                 limit.allowed.text()));
  }
  py::dict row;
  row["products"] = products;
  row["dtypes"] = dtypes;
  row["limits"] = limits;
  return row;
}

py::list limits_of_operators() {
  py::list table;
  for (const auto& entry : limits_table()) {
    py::list variants;
    for (const auto& variant : entry.variants) {
      variants.append(limits_of(variant));
    }
    py::dict row;
    row["operator"] = std::string(entry.op);
    row["aclnn"] = std::string(entry.aclnn);
    row["variants"] = variants;
    table.append(row);
  }
  return table;
}

// The interval of keys that each query keeps.
std::vector<std::pair<int64_t, int64_t>> kept_keys_of_rows(int64_t sparse_mode, int64_t queries,
                                                           int64_t keys, int64_t pre_tokens,
                                                           int64_t next_tokens, int64_t prefix,
                                                           bool is_band) {
  constexpr const char* op = "sparse_mode_mask";
  check_value(sparse_mode >= 0 && sparse_mode <= kLastMaskMode, op, "sparse_mode",
              "expected 0 to 8, got ", sparse_mode);
  check_value(queries >= 0, op, "sq", "expected at least 0, got ", queries);
  check_value(keys >= 0, op, "skv", "expected at least 0, got ", keys);
  const auto kept = kept_keys(static_cast<MaskMode>(sparse_mode), queries, keys, pre_tokens,
                              next_tokens, prefix, is_band);
  std::vector<std::pair<int64_t, int64_t>> rows;
  for (int64_t i = 0; i < queries; ++i) {
    rows.emplace_back(kept.begin(i), kept.end(i));
  }
  return rows;
}

template <typename... Ops>
void add_operators(OperatorList<Ops...>, py::module_& m) {
  py::dict direct_calls;
  py::set inference;
  const auto add = [&]<typename Op>(std::type_identity<Op>) {
    direct_calls[Op::name] = py::cpp_function(&direct_call<Op>);
    if constexpr (requires { Op::no_gradient; }) {
      inference.add(Op::name);
    }
  };
  (add(std::type_identity<Ops>()), ...);
  m.attr("direct_calls") = direct_calls;
  m.attr("inference_operators") = inference;
}

}  // namespace
}  // namespace ascend_attn

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace ascend_attn;
  add_operators(Operators(), m);
  m.def("kept_keys", &kept_keys_of_rows);
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
