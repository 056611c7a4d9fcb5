// Comparisons, for checks, of sizes that may be symbolic. On fake tensors they are assumed to hold.
#pragma once

#include <c10/core/SymInt.h>

#include <cstdint>
#include <limits>

namespace ascend_attn {

// Returns whether two numbers are equal; where one is symbolic, `if_symbolic(a == b)` decides. A
// call compares dozens of sizes, and this takes a fraction of the time of going through optionals.
template <typename Decision>
bool compare_equal(const c10::SymInt& a, const c10::SymInt& b, const Decision& if_symbolic) {
  if (!a.is_heap_allocated() && !b.is_heap_allocated()) {
    return a.as_int_unchecked() == b.as_int_unchecked();
  }
  return if_symbolic(a.sym_eq(b));
}

inline bool same(const c10::SymInt& a, const c10::SymInt& b) {
  return compare_equal(
      a, b, [](const c10::SymBool& equal) { return equal.expect_true(__FILE__, __LINE__); });
}

// Returns whether two numbers are known to be equal; those that depend on data are not known.
inline bool known_equal(const c10::SymInt& a, const c10::SymInt& b) {
  return compare_equal(a, b, [](const c10::SymBool& equal) {
    return equal.has_hint() && equal.guard_bool(__FILE__, __LINE__);
  });
}

// Returns whether two numbers may be equal. Symbols that depend on data may: the call checks them.
inline bool may_equal(const c10::SymInt& a, const c10::SymInt& b) {
  return compare_equal(a, b, [](const c10::SymBool& equal) {
    return !equal.has_hint() || equal.guard_bool(__FILE__, __LINE__);
  });
}

inline bool positive(const c10::SymInt& number) {
  return number.sym_gt(0).expect_true(__FILE__, __LINE__);
}

inline bool at_most(const c10::SymInt& a, const c10::SymInt& b) {
  return a.sym_le(b).expect_true(__FILE__, __LINE__);
}

// For numbers that are not negative: INT64_MAX where the result does not fit.
inline int64_t saturated_product(int64_t a, int64_t b) {
  int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<int64_t>::max() : product;
}
inline int64_t saturated_sum(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<int64_t>::max() : sum;
}
inline c10::SymInt saturated_product(const c10::SymInt& a, const c10::SymInt& b) {
  if (!a.is_heap_allocated() && !b.is_heap_allocated()) {
    return saturated_product(a.as_int_unchecked(), b.as_int_unchecked());
  }
  return a * b;
}

inline bool divides(const c10::SymInt& divisor, const c10::SymInt& value) {
  return (value % divisor).sym_eq(0).expect_true(__FILE__, __LINE__);
}

}  // namespace ascend_attn
