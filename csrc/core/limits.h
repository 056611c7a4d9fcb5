// What each operator accepts on each product: data, beside the rules of the operator in
// csrc/ops/<operator>.cpp. The checks, the documentation and `python -m ascend_attn_ops` read it.
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

// A set of products.
template <std::same_as<Product>... Products>
constexpr uint8_t products(Products... each) {
  return (static_cast<uint8_t>(each) | ...);
}

std::string_view product_name(Product product);
// The product of that name, or an error that lists the names.
Product product_of(std::string_view name);

// Numbers in a fixed place, so that limits are constants.
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
  std::string_view quantity;  // as in CANN's document of the function: "D", "N1", "K", ...
  std::string_view meaning;
  Allowed allowed;
};

// What an operator accepts on the products that have its function and this in common.
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

  // None on products that do not have the function.
  const ProductLimits* on(Product product) const;
};

// The product that calls on this thread are checked for; nothing while limits are switched off.
std::optional<Product> product_in_force();

// What `with ascend_attn_ops.limits(...)` sets on its thread: 0 = nothing set, 1 = switched off,
// otherwise 2 + product. An integer, so that autograd can carry it from forward to backward.
int64_t limits_override();
void set_limits_override(int64_t value);
// The value that checks for `product`, or for nothing.
int64_t limits_override_for(std::optional<Product> product);

// Restores the override at the end of the scope.
class LimitsScope {
 public:
  explicit LimitsScope(int64_t value) : saved_(limits_override()) { set_limits_override(value); }
  ~LimitsScope() { set_limits_override(saved_); }
  LimitsScope(const LimitsScope&) = delete;
  LimitsScope& operator=(const LimitsScope&) = delete;

 private:
  int64_t saved_;
};

// The product of this process, when nothing else is set: the NPU's own, or Atlas A2 without one.
void set_device_product(Product product);

// The limits of one operator for the product in force. Sizes that are still symbolic pass: the same
// check sees them with their values when the kernel runs.
class LimitsCheck {
 public:
  explicit LimitsCheck(const OperatorLimits& table);

  explicit operator bool() const { return limits_ != nullptr; }
  // None while limits are switched off.
  std::optional<Product> product() const { return product_; }
  void dtype(std::string_view argument, c10::ScalarType dtype) const;
  // A quantity of the operator's table, where this product limits it.
  void size(std::string_view argument, std::string_view quantity, const c10::SymInt& value) const;
  // A rule that is more than a set of numbers.
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
