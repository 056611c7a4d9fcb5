// What each operator accepts on each product, as data. The tables stand next to the operator's
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

// Returns a set of products as a bit mask.
template <std::same_as<Product>... Products>
constexpr uint8_t products(Products... each) {
  return (static_cast<uint8_t>(each) | ...);
}

std::string_view product_name(Product product);
// Returns the product of that name; otherwise raises an error that lists the valid names.
Product product_of(std::string_view name);

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

// A set of integers: those listed in `one_of`, and the multiples of `multiple_of` in [min, max].
struct Allowed {
  int64_t min = 1;
  int64_t max = 0;
  int64_t multiple_of = 1;
  NumberList one_of = {};

  bool contains(int64_t value) const;
  std::string text() const;
};

struct Limit {
  std::string_view quantity;  // as in CANN's documentation of the function: "D", "N1", "K", ...
  std::string_view meaning;
  Allowed allowed;
};

// What an operator accepts on a group of products that have the same limits.
struct ProductLimits {
  uint8_t products;
  std::vector<c10::ScalarType> dtypes;
  std::vector<Limit> limits;

  const Limit* find(std::string_view quantity) const;
};

struct OperatorLimits {
  const char* op;
  std::span<const char* const> functions;  // the aclnn functions that it calls
  std::vector<ProductLimits> variants;

  // Returns null for products that lack the function.
  const ProductLimits* on(Product product) const;
};

// Returns the product whose limits apply to calls on this thread, or nullopt while limits are off.
std::optional<Product> product_in_force();

// The value that `with ascend_attn_ops.limits(...)` sets on its thread: 0 = not set, 1 = limits
// off, otherwise 2 + product. An integer, so that autograd can carry it from forward to backward.
int64_t limits_override();
void set_limits_override(int64_t value);
// Encodes a product, or nullopt for no limits, as an override value.
int64_t limits_override_for(std::optional<Product> product);

// Sets the override and restores the previous one at the end of the scope.
class LimitsScope {
 public:
  explicit LimitsScope(int64_t value) : saved_(limits_override()) { set_limits_override(value); }
  ~LimitsScope() { set_limits_override(saved_); }
  LimitsScope(const LimitsScope&) = delete;
  LimitsScope& operator=(const LimitsScope&) = delete;

 private:
  int64_t saved_;
};

// Sets the default product of this process to that of its NPU. Without an NPU it is Atlas A2.
void set_device_product(Product product);

// Checks a call against the limits of its operator on the product in force. Sizes that are still
// symbolic pass: the same check sees their values when the kernel runs.
class LimitsCheck {
 public:
  explicit LimitsCheck(const OperatorLimits& table);

  explicit operator bool() const { return limits_ != nullptr; }
  // nullopt while limits are off.
  std::optional<Product> product() const { return product_; }
  void dtype(std::string_view argument, c10::ScalarType dtype) const;
  // Checks a quantity of the operator's table, if this product limits it.
  void size(std::string_view argument, std::string_view quantity, const c10::SymInt& value) const;
  // Checks a rule that a set of numbers cannot express.
  template <typename... Got>
  void rule(std::string_view argument, bool holds, std::string_view expected,
            const Got&... got) const {
    if (limits_ && !holds) [[unlikely]] {
      reject(Violation::value, argument, std::string(expected), c10::str(got...));
    }
  }

 private:
  [[noreturn]] void reject(Violation violation, std::string_view argument,
                           const std::string& expected, const std::string& got) const;

  const OperatorLimits& table_;
  const ProductLimits* limits_ = nullptr;
  std::optional<Product> product_;
};

}  // namespace ascend_attn
