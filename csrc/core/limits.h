// Limits of each operator on each device, as data. The tables stand next to the operator's
// rules in csrc/ops/<operator>.cpp; the checks, the documentation and `python -m ascend_attn_ops`
// read them.
#pragma once

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/device.h"
#include "core/error.h"

namespace ascend_attn {

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

}  // namespace ascend_attn
