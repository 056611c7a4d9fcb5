// What each operator accepts on each device, as data. The tables stand next to the operator's
// rules in csrc/ops/<operator>.cpp; the checks, the documentation and `python -m ascend_attn_ops`
// read them.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/core/SymInt.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace ascend_attn {

enum class Product : uint8_t { A2 = 1, A3 = 2, P950 = 4, P310 = 8 };

inline constexpr std::array kProducts{Product::A2, Product::A3, Product::P950, Product::P310};

// Versions of CANN, oldest first.
enum class Cann : uint8_t { v8_5 = 1, v9_0 = 2, v9_1 = 4 };

inline constexpr std::array kCannVersions{Cann::v8_5, Cann::v9_0, Cann::v9_1};
inline constexpr Cann kNewestCann = kCannVersions.back();

// What limits depend on.
struct Device {
  Product product = Product::A2;
  Cann cann = kNewestCann;

  bool operator==(const Device&) const = default;
};

// A set of devices: these products with these versions of CANN.
struct Devices {
  uint8_t products = 0xff;
  uint8_t cann_versions = 0xff;

  constexpr bool contain(Device device) const {
    return (products & static_cast<uint8_t>(device.product)) != 0 &&
           (cann_versions & static_cast<uint8_t>(device.cann)) != 0;
  }
  constexpr Devices since(Cann first) const {
    return {products, static_cast<uint8_t>(cann_versions & ~(static_cast<uint8_t>(first) - 1))};
  }
  constexpr Devices before(Cann first) const {
    return {products, static_cast<uint8_t>(cann_versions & (static_cast<uint8_t>(first) - 1))};
  }
};

inline constexpr Devices kAllDevices{};

// Returns these products with every version of CANN.
template <std::same_as<Product>... Products>
constexpr Devices on(Products... each) {
  return {static_cast<uint8_t>((static_cast<uint8_t>(each) | ...))};
}

inline constexpr Devices kA2A3 = on(Product::A2, Product::A3);
inline constexpr Devices k950 = on(Product::P950);
inline constexpr Devices k310P = on(Product::P310);

std::string_view product_name(Product product);
std::string_view cann_name(Cann cann);
// Return the product or the version of that name; otherwise raise an error with the valid names.
Product product_of(std::string_view name);
Cann cann_of(std::string_view name);

// A list with a fixed capacity, so that limits can be constants.
class NumberList {
 public:
  constexpr NumberList() = default;
  constexpr NumberList(std::initializer_list<int64_t> numbers) : size_(numbers.size()) {
    std::ranges::copy(numbers, numbers_.begin());
  }
  constexpr size_t size() const { return size_; }
  constexpr const int64_t* begin() const { return numbers_.data(); }
  constexpr const int64_t* end() const { return numbers_.data() + size_; }

 private:
  std::array<int64_t, 16> numbers_{};
  size_t size_ = 0;
};

// A set of integers: those listed in `one_of`, the multiples of `multiple_of` in [min, max], and
// all positive multiples of `or_multiple_of`.
struct Allowed {
  int64_t min = 1;
  int64_t max = 0;
  int64_t multiple_of = 1;
  int64_t or_multiple_of = 0;
  NumberList one_of = {};

  bool contains(int64_t value) const;
  std::string text() const;
};

struct Limit {
  std::string_view quantity;  // as in CANN's documentation of the function: "D", "N1", "K", ...
  std::string_view meaning;
  Allowed allowed;
  Devices devices = kAllDevices;
};

// A limit that a set of numbers cannot express.
struct Rule {
  std::string_view argument;
  std::string_view expected;
  Devices devices = kAllDevices;
  Violation violation = Violation::value;
};

struct Dtypes {
  Devices devices;
  std::vector<c10::ScalarType> dtypes;
};

struct OperatorLimits {
  const char* op;
  std::span<const char* const> functions;  // the aclnn functions that it calls
  std::vector<Dtypes> dtypes;              // a device that none of them names lacks the operator
  std::vector<Limit> limits;
  std::vector<Rule> rules = {};

  // Returns null for devices that lack the operator.
  const Dtypes* dtypes_on(Device device) const;
  // Returns null where the device does not limit the quantity.
  const Limit* find(std::string_view quantity, Device device) const;
};

// Returns the device whose limits apply to calls here, or nullopt while limits are off.
std::optional<Device> device_in_force();

// Returns whether limits are on, for one of these devices.
inline bool in_force(Devices devices) {
  const auto device = device_in_force();
  return device && devices.contain(*device);
}

// What overrides the limits of this process: 0 = nothing, 1 = limits off, otherwise a device. An
// integer, so that autograd can carry it from forward to backward.
int64_t limits_override();
// That of this thread, which a LimitsScope sets, comes before that of the task.
inline constexpr int64_t kLimitsOfTask = -1;
int64_t limits_override_of_thread();
void set_limits_override_of_thread(int64_t value);
// How to read the override of the task that calls; null while none has ever had one. A task is one
// of Python (PEP 567), and not of this library's core.
void set_limits_override_of_task(int64_t (*read)());
// Encodes a device, or nullopt for no limits, as an override value.
int64_t limits_override_for(std::optional<Device> device);

// Sets the override of this thread, and restores the previous one at the end of the scope.
class LimitsScope {
 public:
  explicit LimitsScope(int64_t value) : saved_(limits_override_of_thread()) {
    set_limits_override_of_thread(value);
  }
  ~LimitsScope() { set_limits_override_of_thread(saved_); }
  LimitsScope(const LimitsScope&) = delete;
  LimitsScope& operator=(const LimitsScope&) = delete;

 private:
  int64_t saved_;
};

// Sets what applies in this process where nothing overrides it: a device, or nullopt for no limits.
// Until then it is Atlas A2 with the newest CANN.
void set_default_limits(std::optional<Device> device);

// Checks a call against the limits of its operator on the device in force. Sizes that are still
// symbolic pass: the same check sees their values when the kernel runs.
class LimitsCheck {
 public:
  explicit LimitsCheck(const OperatorLimits& table);

  explicit operator bool() const { return device_.has_value(); }
  // Returns whether limits are on, for one of these devices.
  bool on(Devices devices) const { return device_ && devices.contain(*device_); }
  void dtype(std::string_view argument, c10::ScalarType dtype) const;
  // Checks a quantity of the operator's table, if this device limits it.
  void size(std::string_view argument, std::string_view quantity, const c10::SymInt& value) const;
  // Checks a rule of the operator's table, if it is one of this device.
  template <typename... Got>
  void rule(const Rule& rule, bool holds, const Got&... got) const {
    if (!holds && on(rule.devices)) [[unlikely]] {
      reject(rule, c10::str(got...));
    }
  }

 private:
  [[noreturn]] void reject(const Rule& rule, const std::string& got) const;
  [[noreturn]] void reject(Violation violation, std::string_view argument,
                           const std::string& expected, bool of_this_version,
                           const std::string& got) const;
  // Returns whether `holds` differs between the versions of CANN for the product in force.
  template <typename Predicate>
  bool depends_on_version(Predicate holds) const;

  const OperatorLimits& table_;
  std::optional<Device> device_;
  const std::vector<c10::ScalarType>* dtypes_ = nullptr;
};

}  // namespace ascend_attn
