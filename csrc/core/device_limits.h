// Checks calls against the limits of their operator on the device in force.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/core/SymInt.h>
#include <c10/util/StringUtil.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/limits.h"

namespace ascend_attn {

// The limits of an operator on the device in force. Sizes that are still symbolic pass: the same
// check sees their values when the kernel runs.
class DeviceLimits {
 public:
  explicit DeviceLimits(const OperatorLimits& table);

  explicit operator bool() const { return device_.has_value(); }
  // Returns whether limits are on, for one of these devices.
  bool on(Devices devices) const { return device_ && devices.contain(*device_); }
  void dtype(std::string_view argument, c10::ScalarType dtype) const;
  // Checks a quantity of the operator's table, if this device limits it. `hint` follows the value
  // in the error.
  void size(std::string_view argument, std::string_view quantity, const c10::SymInt& value,
            std::string_view hint = {}) const;
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
