#include "core/limits.h"

#include <algorithm>
#include <array>
#include <atomic>

namespace ascend_attn {
namespace {

constexpr int64_t kNotSet = 0;
constexpr int64_t kOff = 1;
constexpr int64_t kFirstProduct = 2;

thread_local int64_t override_in_force = kNotSet;
std::atomic<Product> device_product{Product::A2};

}  // namespace

std::string_view product_name(Product product) {
  switch (product) {
    case Product::A2:
      return "A2";
    case Product::A3:
      return "A3";
    case Product::P950:
      return "950";
    case Product::P310:
      return "310P";
  }
  return "unknown";
}

Product product_of(std::string_view name) {
  for (const auto product : kProducts) {
    if (product_name(product) == name) {
      return product;
    }
  }
  raise(Violation::value, "limits", "product",
        c10::str("expected None or one of 'A2', 'A3', '950', '310P', got '", name, "'"));
}

bool Allowed::contains(int64_t value) const {
  for (const auto listed : one_of) {
    if (value == listed) {
      return true;
    }
  }
  return value >= min && value <= max && value % multiple_of == 0;
}

std::string Allowed::text() const {
  std::string list;
  for (const auto listed : one_of) {
    list += (list.empty() ? "" : ", ") + std::to_string(listed);
  }
  if (min > max) {
    return one_of.size() == 1 ? list : "one of " + list;
  }
  const auto range = c10::str(min, "..", max);
  const auto multiples =
      multiple_of == 1 ? range : c10::str("a multiple of ", multiple_of, " in ", range);
  return list.empty() ? multiples : multiples + " or one of " + list;
}

const Limit* ProductLimits::find(std::string_view quantity) const {
  const auto found = std::ranges::find(limits, quantity, &Limit::quantity);
  return found == limits.end() ? nullptr : &*found;
}

const ProductLimits* OperatorLimits::on(Product product) const {
  const auto found = std::ranges::find_if(variants, [product](const ProductLimits& limits) {
    return (limits.products & static_cast<uint8_t>(product)) != 0;
  });
  return found == variants.end() ? nullptr : &*found;
}

std::optional<Product> product_in_force() {
  switch (override_in_force) {
    case kNotSet:
      return device_product.load(std::memory_order_relaxed);
    case kOff:
      return std::nullopt;
    default:
      return static_cast<Product>(override_in_force - kFirstProduct);
  }
}

int64_t limits_override() { return override_in_force; }
void set_limits_override(int64_t value) { override_in_force = value; }
int64_t limits_override_for(std::optional<Product> product) {
  return product ? kFirstProduct + static_cast<int64_t>(*product) : kOff;
}
void set_device_product(Product product) { device_product.store(product); }

LimitsCheck::LimitsCheck(const OperatorLimits& table)
    : table_(table), product_(product_in_force()) {
  if (!product_) {
    return;
  }
  limits_ = table.on(*product_);
  if (!limits_) [[unlikely]] {
    raise(Violation::not_implemented, table.op, "product",
          c10::str("expected a product that has ", table.functions.front(), ", got Ascend ",
                   product_name(*product_), "; ascend_attn_ops.limits(...) chooses another"));
  }
}

void LimitsCheck::dtype(std::string_view argument, c10::ScalarType dtype) const {
  if (!limits_ || std::ranges::find(limits_->dtypes, dtype) != limits_->dtypes.end()) {
    return;
  }
  std::string expected;
  for (const auto allowed : limits_->dtypes) {
    expected += (expected.empty() ? "" : " or ") + std::string(dtype_name(allowed));
  }
  reject(Violation::type, argument, "dtype " + expected, std::string(dtype_name(dtype)));
}

void LimitsCheck::size(std::string_view argument, std::string_view quantity,
                       const c10::SymInt& value) const {
  if (!limits_) {
    return;
  }
  const auto known = value.maybe_as_int();
  if (!known) {
    return;
  }
  const auto* limit = limits_->find(quantity);
  if (!limit) {
    // A misspelt quantity would silently disable its rule.
    const bool elsewhere = std::ranges::any_of(
        table_.variants, [&](const ProductLimits& variant) { return variant.find(quantity); });
    TORCH_INTERNAL_ASSERT(elsewhere, table_.op, " has no limit of ", quantity);
    return;
  }
  if (!limit->allowed.contains(*known)) [[unlikely]] {
    reject(Violation::value, argument,
           c10::str(quantity, " (", limit->meaning, ") to be ", limit->allowed.text()),
           std::to_string(*known));
  }
}

void LimitsCheck::reject(Violation violation, std::string_view argument,
                         const std::string& expected, const std::string& got) const {
  raise(violation, table_.op, argument,
        c10::str("expected ", expected, " on Ascend ", product_name(*product_), ", got ", got,
                 "; on the CPU ascend_attn_ops.limits(None) lifts the device's limits"));
}

}  // namespace ascend_attn
