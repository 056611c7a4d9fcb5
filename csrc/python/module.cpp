// The Python module `_C`: direct calls, limits, the mask rule and checks of values.
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "core/device_in_force.h"
#include "core/error.h"
#include "core/lengths.h"
#include "core/limits.h"
#include "core/sparse_mode.h"
#include "core/tensor_checks.h"
#include "core/value_checks.h"
#include "cpu/common/capability.h"
#include "cpu/common/matrix_products.h"
#include "cpu/common/softmax_statistics.h"
#include "cpu/common/tile_gemm.h"
#include "ops/flash_attention_score_rules.h"
#include "ops/operators.h"
#include "python/direct_call.h"

namespace ascend_attn {
namespace {

namespace py = pybind11;

// Returns what an operator accepts on a device that has it.
py::dict limits_of(const OperatorLimits& table, Device device) {
  py::list dtypes;
  for (const auto dtype : table.dtypes_on(device)->dtypes) {
    dtypes.append(dtype_name(dtype));
  }
  py::list limits;
  for (const auto& limit : table.limits) {
    // The first limit of a quantity that fits this device applies.
    if (table.find(limit.quantity, device) == &limit) {
      limits.append(py::make_tuple(std::string(limit.quantity), std::string(limit.meaning),
                                   limit.allowed.text()));
    }
  }
  py::list rules;
  for (const auto& rule : table.rules) {
    if (rule.devices.contain(device)) {
      rules.append(py::make_tuple(std::string(rule.argument), std::string(rule.expected)));
    }
  }
  py::dict row;
  row["dtypes"] = dtypes;
  row["limits"] = limits;
  row["rules"] = rules;
  return row;
}

py::tuple device_names(Device device) {
  return py::make_tuple(std::string(product_name(device.product)),
                        std::string(cann_name(device.cann)));
}

py::dict limits_of(const OperatorLimits& table) {
  py::list functions;
  for (const auto* function : table.functions) {
    functions.append(function);
  }
  py::dict devices;
  for (const auto& product : kProducts) {
    for (const auto& version : kCannVersions) {
      if (const Device device{product.product, version.cann}; table.dtypes_on(device)) {
        devices[device_names(device)] = limits_of(table, device);
      }
    }
  }
  py::dict row;
  row["operator"] = table.op;
  row["aclnn"] = functions;
  row["devices"] = devices;
  return row;
}

// Returns (name, how the names of its SoCs begin) of each product.
py::tuple product_names() {
  py::list rows;
  for (const auto& product : kProducts) {
    rows.append(py::make_tuple(std::string(product.name), std::string(product.soc)));
  }
  return py::tuple(rows);
}

// Oldest first.
py::tuple cann_versions() {
  py::list names;
  for (const auto& version : kCannVersions) {
    names.append(std::string(version.name));
  }
  return py::tuple(names);
}

// The first, the smallest and the largest of integers of one axis; None for tensors that are not on
// the host, that have more of them than an operator takes, or whose values cannot be read as they
// lie.
std::optional<std::array<int64_t, 3>> bounds_of(const at::Tensor& integers) {
  constexpr c10::DispatchKeySet kOther{c10::DispatchKey::Python, c10::DispatchKey::ZeroTensor,
                                       c10::DispatchKey::FuncTorchGradWrapper,
                                       c10::DispatchKey::FuncTorchBatched};
  const auto dtype = integers.scalar_type();
  if (!integers.is_cpu() || integers.layout() != at::kStrided ||
      integers.key_set().has_any(kOther) || (dtype != at::kInt && dtype != at::kLong) ||
      integers.dim() != 1 || integers.numel() == 0 || integers.numel() > kMostLengths ||
      !has_memory(integers)) {
    return std::nullopt;
  }
  const auto find = [&]<typename T>(const T* at) {
    std::array<int64_t, 3> bounds{*at, *at, *at};
    for (int64_t i = 0; i < integers.size(0); ++i, at += integers.stride(0)) {
      bounds[1] = std::min<int64_t>(bounds[1], *at);
      bounds[2] = std::max<int64_t>(bounds[2], *at);
    }
    return bounds;
  };
  return dtype == at::kInt ? find(integers.const_data_ptr<int32_t>())
                           : find(integers.const_data_ptr<int64_t>());
}

// A device as Python names it: None for no limits, no version for the newest.
std::optional<Device> device_of(const std::optional<std::string>& product,
                                const std::optional<std::string>& cann) {
  const auto version = cann ? cann_of(*cann) : kNewestCann;
  return product ? std::optional(Device{product_of(*product), version}) : std::nullopt;
}

py::list limits_of_operators() {
  py::list table;
  Operators::for_each([&]<typename Op>() { table.append(limits_of(Op::limits)); });
  return table;
}

// Returns the batch, token and head axes of every layout; -1 for none.
py::dict layout_axes() {
  py::dict axes;
  for (const auto layout : kLayouts) {
    const auto [rank, batch, tokens, heads] = axes_of(layout);
    axes[py::str(std::string(layout_name(layout)))] = py::make_tuple(batch, tokens, heads);
  }
  return axes;
}

// Returns the interval of keys that each query keeps.
std::vector<std::pair<int64_t, int64_t>> kept_keys_of_rows(int64_t sparse_mode, int64_t queries,
                                                           int64_t keys, int64_t pre_tokens,
                                                           int64_t next_tokens, int64_t prefix,
                                                           bool is_band) {
  const auto check = [](const char* argument, int64_t given, int64_t most, const char* expected) {
    if (given < 0 || given > most) {
      raise(Violation::value, "sparse_mode_mask", argument,
            c10::str("expected ", expected, ", got ", given), Status::none);
    }
  };
  check("sparse_mode", sparse_mode, kLastSparseMode, "0 to 8");
  check("sq", queries, INT64_MAX, "at least 0");
  check("skv", keys, INT64_MAX, "at least 0");
  const auto kept = kept_keys(static_cast<SparseMode>(sparse_mode), queries, keys, pre_tokens,
                              next_tokens, prefix, is_band);
  std::vector<std::pair<int64_t, int64_t>> rows;
  for (int64_t i = 0; i < queries; ++i) {
    rows.emplace_back(kept.begin(i), kept.end(i));
  }
  return rows;
}

py::dict cpu_implementations() {
  py::dict result;
  for (const auto& [kind, text] : cpu::implementations()) {
    result[kind] = text;
  }
  return result;
}

// The sparse_modes that read a compressed mask.
py::tuple compressed_modes() {
  py::list modes;
  for (int64_t mode = 0; mode <= kLastSparseMode; ++mode) {
    if (has_compressed_mask(static_cast<SparseMode>(mode))) {
      modes.append(mode);
    }
  }
  return modes;
}

void add_operators(py::module_& m) {
  py::dict direct_calls;
  py::set inference;
  Operators::for_each([&]<typename Op>() {
    direct_calls[Op::name] = py::cpp_function(&direct_call<Op>);
    if constexpr (requires { Op::no_gradient; }) {
      inference.add(Op::name);
    }
  });
  py::list with_lengths;
  const auto add_name = [&]<typename Op>() {
    if constexpr (kHasLengths<Op>) {
      with_lengths.append(Op::name);
    }
  };
  Operators::for_each(add_name);
  PrivateOperators::for_each(add_name);
  m.attr("operators_with_lengths") = py::tuple(with_lengths);
  m.attr("direct_calls") = direct_calls;
  m.attr("inference_operators") = inference;
}

}  // namespace
}  // namespace ascend_attn

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace ascend_attn;
  add_operators(m);
#if defined(__clang__)
  m.attr("compiler") = __VERSION__;
#else
  m.attr("compiler") = "GCC " __VERSION__;
#endif
  m.def("cpu_implementations", &cpu_implementations);
  m.def("check_cpu_capability", &cpu::check_capability);
  m.attr("vector_units") = py::tuple(py::cast(cpu::built_units()));
  m.def("matrix_products", [] { return cpu::name_of(cpu::product_choice().products); });
  m.def("kept_keys", &kept_keys_of_rows);
  m.def("check_statistics",
        [](const std::string& op, const at::Tensor& max, const at::Tensor& sum) {
          cpu::check_statistics(op, max.contiguous(), sum.contiguous(), max.numel());
        });
  m.def("has_memory", &has_memory);
  m.def("bounds_of", &bounds_of);
  m.def("limits_table", &limits_of_operators);
  m.attr("products") = product_names();
  m.attr("cann_versions") = cann_versions();
  m.attr("layout_axes") = layout_axes();
  m.attr("compressed_modes") = compressed_modes();
  m.attr("most_sequences") = kMostSequences;
  m.attr("compressed_mask_size") = kCompressedMaskSize;
  m.attr("compressed_mask_prefix_rows") = kCompressedMaskPrefixRows;
  m.def("limits_override", &limits_override);
  py::class_<LimitsBlock, std::shared_ptr<LimitsBlock>>(m, "LimitsBlock")
      .def("is_of_this_thread", &LimitsBlock::is_of_this_thread)
      .def("end", &LimitsBlock::end);
  m.def("begin_limits_block", &begin_limits_block);
  m.def("limits_override_for",
        [](const std::optional<std::string>& product, const std::optional<std::string>& cann) {
          return limits_override_for(device_of(product, cann));
        });
  m.def("set_default_limits",
        [](const std::optional<std::string>& product, const std::optional<std::string>& cann) {
          set_default_limits(device_of(product, cann));
        });
  m.def("device_named", [](const std::string& product, const std::optional<std::string>& cann) {
    return device_names(*device_of(product, cann));
  });
  m.def("request_value_checks", [](int change) { value_check_requests += change; });
  m.def("device_in_force", []() -> std::optional<py::tuple> {
    const auto device = device_in_force();
    return device ? std::optional(device_names(*device)) : std::nullopt;
  });
}
