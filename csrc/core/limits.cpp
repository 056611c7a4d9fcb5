#include "core/limits.h"

#include <algorithm>
#include <array>
#include <atomic>

namespace ascend_attn {
namespace {

constexpr int64_t kNotSet = 0;
constexpr int64_t kOff = 1;
constexpr int64_t kFirstDevice = 2;
constexpr int64_t kCannStep = 256;

thread_local int64_t override_of_thread = kLimitsOfTask;
std::atomic<int64_t (*)()> override_of_task{nullptr};

std::optional<Device> decoded(int64_t value) {
  if (value == kOff) {
    return std::nullopt;
  }
  const auto device = value - kFirstDevice;
  return Device{static_cast<Product>(device % kCannStep), static_cast<Cann>(device / kCannStep)};
}

std::atomic<int64_t> default_limits{limits_override_for(Device())};

// Returns the item of `all` with that name.
template <typename Items, typename Name>
auto item_of(const Items& all, Name name_of, std::string_view argument, std::string_view none,
             std::string_view name) {
  std::string names;
  for (const auto item : all) {
    if (name_of(item) == name) {
      return item;
    }
    names += c10::str(names.empty() ? "'" : ", '", name_of(item), "'");
  }
  raise(Violation::value, "limits", argument,
        c10::str("expected ", none, " or one of ", names, ", got ", quoted(name)));
}

std::string device_text(Device device, bool with_version) {
  auto text = c10::str("Ascend ", product_name(device.product));
  return with_version ? c10::str(text, " with CANN ", cann_name(device.cann)) : text;
}

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

std::string_view cann_name(Cann cann) {
  switch (cann) {
    case Cann::v8_5:
      return "8.5";
    case Cann::v9_0:
      return "9.0";
    case Cann::v9_1:
      return "9.1";
  }
  return "unknown";
}

Product product_of(std::string_view name) {
  return item_of(kProducts, product_name, "product", "None", name);
}

Cann cann_of(std::string_view name) {
  return item_of(kCannVersions, cann_name, "cann", "None for the newest", name);
}

bool Allowed::contains(int64_t value) const {
  for (const auto listed : one_of) {
    if (value == listed) {
      return true;
    }
  }
  return (value >= min && value <= max && value % multiple_of == 0) ||
         (or_multiple_of != 0 && value > 0 && value % or_multiple_of == 0);
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
      (multiple_of == 1 ? range : c10::str("a multiple of ", multiple_of, " in ", range)) +
      (or_multiple_of == 0 ? "" : c10::str(" or a multiple of ", or_multiple_of));
  return list.empty() ? multiples : multiples + " or one of " + list;
}

const Dtypes* OperatorLimits::dtypes_on(Device device) const {
  const auto found = std::ranges::find_if(
      dtypes, [device](const Dtypes& entry) { return entry.devices.contain(device); });
  return found == dtypes.end() ? nullptr : &*found;
}

const Limit* OperatorLimits::find(std::string_view quantity, Device device) const {
  const auto found = std::ranges::find_if(limits, [&](const Limit& limit) {
    return limit.quantity == quantity && limit.devices.contain(device);
  });
  return found == limits.end() ? nullptr : &*found;
}

std::optional<Device> device_in_force() {
  const auto override = limits_override();
  return decoded(override == kNotSet ? default_limits.load(std::memory_order_relaxed) : override);
}

int64_t limits_override() {
  if (override_of_thread != kLimitsOfTask) {
    return override_of_thread;
  }
  auto* const read = override_of_task.load(std::memory_order_acquire);
  return read ? read() : kNotSet;
}
int64_t limits_override_of_thread() { return override_of_thread; }
void set_limits_override_of_thread(int64_t value) { override_of_thread = value; }
void set_limits_override_of_task(int64_t (*read)()) {
  override_of_task.store(read, std::memory_order_release);
}
int64_t limits_override_for(std::optional<Device> device) {
  return device ? kFirstDevice + static_cast<int64_t>(device->product) +
                      kCannStep * static_cast<int64_t>(device->cann)
                : kOff;
}
void set_default_limits(std::optional<Device> device) {
  default_limits.store(limits_override_for(device));
}

LimitsCheck::LimitsCheck(const OperatorLimits& table) : table_(table), device_(device_in_force()) {
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
bool LimitsCheck::depends_on_version(Predicate holds) const {
  const bool here = holds(*device_);
  return std::ranges::any_of(
      kCannVersions, [&](Cann cann) { return holds(Device{device_->product, cann}) != here; });
}

void LimitsCheck::dtype(std::string_view argument, c10::ScalarType dtype) const {
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

void LimitsCheck::size(std::string_view argument, std::string_view quantity,
                       const c10::SymInt& value) const {
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
           std::to_string(*known));
  }
}

void LimitsCheck::reject(const Rule& rule, const std::string& got) const {
  // A rule that its table lacks would be missing in the documentation.
  TORCH_INTERNAL_ASSERT(
      std::ranges::find(table_.rules, rule.expected, &Rule::expected) != table_.rules.end(),
      table_.op, " does not list the rule '", rule.expected, "'");
  const bool of_version =
      depends_on_version([&](Device device) { return rule.devices.contain(device); });
  reject(rule.violation, rule.argument, std::string(rule.expected), of_version, got);
}

void LimitsCheck::reject(Violation violation, std::string_view argument,
                         const std::string& expected, bool of_this_version,
                         const std::string& got) const {
  raise(violation, table_.op, argument,
        c10::str("expected ", expected, " on ", device_text(*device_, of_this_version), ", got ",
                 got, "; on the CPU ascend_attn_ops.limits(None) lifts the device's limits"));
}

}  // namespace ascend_attn
