#include "core/device_limits.h"

#include <algorithm>

#include "core/device_in_force.h"

namespace ascend_attn {
namespace {

std::string device_text(Device device, bool with_version) {
  auto text = c10::str("Ascend ", product_name(device.product));
  return with_version ? c10::str(text, " with CANN ", cann_name(device.cann)) : text;
}

}  // namespace

DeviceLimits::DeviceLimits(const OperatorLimits& table)
    : table_(table), device_(device_in_force()) {
  if (!device_) {
    return;
  }
  const auto* dtypes = table.dtypes_on(*device_);
  if (!dtypes) [[unlikely]] {
    const bool of_version =
        depends_on_version([&](Device device) { return table.dtypes_on(device) != nullptr; });
    raise(Violation::not_implemented, table.op, "product",
          c10::str("expected a product that has ", table.functions.front(), ", got ",
                   device_text(*device_, of_version),
                   "; ascend_attn_ops.limits(...) chooses another"));
  }
  dtypes_ = &dtypes->dtypes;
}

template <typename Predicate>
bool DeviceLimits::depends_on_version(Predicate holds) const {
  const bool here = holds(*device_);
  return std::ranges::any_of(kCannVersions, [&](const CannName& version) {
    return holds(Device{device_->product, version.cann}) != here;
  });
}

void DeviceLimits::dtype(std::string_view argument, c10::ScalarType dtype) const {
  if (!device_ || std::ranges::find(*dtypes_, dtype) != dtypes_->end()) {
    return;
  }
  std::string expected;
  for (const auto allowed : *dtypes_) {
    expected += (expected.empty() ? "" : " or ") + dtype_name(allowed);
  }
  const bool of_version = depends_on_version([&](Device device) {
    const auto* dtypes = table_.dtypes_on(device);
    return dtypes && dtypes->dtypes == *dtypes_;
  });
  reject(Violation::type, argument, "dtype " + expected, of_version, dtype_name(dtype));
}

void DeviceLimits::size(std::string_view argument, std::string_view quantity,
                        const c10::SymInt& value, std::string_view hint) const {
  if (!device_) {
    return;
  }
  const auto known = value.maybe_as_int();
  if (!known) {
    return;
  }
  const auto* limit = table_.find(quantity, *device_);
  if (!limit) {
    // A misspelt quantity would silently disable its rule.
    TORCH_INTERNAL_ASSERT(
        std::ranges::find(table_.limits, quantity, &Limit::quantity) != table_.limits.end(),
        table_.op, " has no limit of ", quantity);
    return;
  }
  if (!limit->allowed.contains(*known)) [[unlikely]] {
    const auto allowed = limit->allowed.text();
    const bool of_version = depends_on_version([&](Device device) {
      const auto* other = table_.find(quantity, device);
      return other && other->allowed.text() == allowed;
    });
    reject(Violation::value, argument,
           c10::str(quantity, " (", limit->meaning, ") to be ", allowed), of_version,
           c10::str(*known, hint));
  }
}

void DeviceLimits::reject(const Rule& rule, const std::string& got) const {
  // A rule that its table lacks would be missing in the documentation.
  TORCH_INTERNAL_ASSERT(
      std::ranges::find(table_.rules, rule.expected, &Rule::expected) != table_.rules.end(),
      table_.op, " does not list the rule '", rule.expected, "'");
  const bool of_version =
      depends_on_version([&](Device device) { return rule.devices.contain(device); });
  reject(rule.violation, rule.argument, std::string(rule.expected), of_version, got);
}

void DeviceLimits::reject(Violation violation, std::string_view argument,
                          const std::string& expected, bool of_this_version,
                          const std::string& got) const {
  raise(
      violation, table_.op, argument,
      c10::str("expected ", expected, " on ", device_text(*device_, of_this_version), ", got ", got,
               "; on the CPU ascend_attn_ops.set_limits(None), or a block of limits(None), lifts "
               "the device's limits"));
}

}  // namespace ascend_attn
