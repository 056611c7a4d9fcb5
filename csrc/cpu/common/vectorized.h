// Loops that use the vector units of the machine they run on, in a binary that runs on any machine
// unless it is built for one.
#pragma once

#include <c10/util/BFloat16.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cpu/common/capability.h"

namespace ascend_attn::cpu {

// The size of a vector, given to the bodies that take one.
template <int64_t bytes>
using VectorBytes = std::integral_constant<int64_t, bytes>;
template <typename Body>
inline constexpr bool takes_vector_bytes = std::is_invocable_v<Body&, VectorBytes<16>>;

#if defined(__x86_64__) && defined(__GNUC__)
template <typename Body>
[[gnu::noinline, gnu::flatten, gnu::target("avx2,fma,bmi,bmi2")]]
void run_with_avx2(Body& body) {
  if constexpr (takes_vector_bytes<Body>) {
    body(VectorBytes<32>());
  } else {
    body();
  }
}

template <typename Body>
[[gnu::noinline, gnu::flatten,
  gnu::target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma,bmi,bmi2")]]
void run_with_avx512(Body& body) {
  if constexpr (takes_vector_bytes<Body>) {
    body(VectorBytes<64>());
  } else {
    body();
  }
}
#endif

// Runs the loops in `body`, which is compiled once for each built vector unit. Not target_clones:
// Clang has it for fewer targets, and cannot tell which clone runs.
template <typename Body>
void vectorized(Body body) {
#if defined(__x86_64__) && defined(__GNUC__)
  if constexpr (is_built(VectorUnit::avx512)) {
    if (kVectorUnit == VectorUnit::avx512) {
      return run_with_avx512(body);
    }
  }
  if constexpr (is_built(VectorUnit::avx2)) {
    if (kVectorUnit == VectorUnit::avx2) {
      return run_with_avx2(body);
    }
  }
#endif
  if constexpr (!is_built(VectorUnit::baseline)) {
    return;
  } else if constexpr (takes_vector_bytes<Body>) {
    body(VectorBytes<16>());
  } else {
    body();
  }
}

// Returns a * b + c, rounded once wherever vectors of this size have such an instruction. Compilers
// fuse some of the sums in a block of one shape, and none in another: the bits of a product would
// depend on its size.
template <int64_t bytes, typename T>
[[gnu::always_inline]] inline T multiply_add(T a, T b, T c) {
#if defined(__aarch64__)
  constexpr bool has_fma = true;
#else
  constexpr bool has_fma = bytes > 16;
#endif
  return has_fma ? std::fma(a, b, c) : a * b + c;
}

inline double exponential(double x) { return std::exp(x); }

// exp(x) = 2^exponent * fraction, in straight-line code that compilers vectorise (relative error
// below 1e-7).
struct ExponentialParts {
  explicit ExponentialParts(float x) {
    // Adding 1.5 * 2^23 rounds to an integer, and leaves that integer in the low bits.
    constexpr float rounder = 12582912.0f;
    const float shifted = x * 1.44269504088896341f + rounder;
    const float n = shifted - rounder;
    // ln(2) in two parts, the first short enough for n * part to be exact.
    const float r = (x - n * 0.693145751953125f) - n * 1.42860677e-6f;
    float series = 1.0f / 5040;
    series = series * r + 1.0f / 720;
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    fraction = series * r + 1.0f;
    exponent = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(rounder);
  }

  // The product of both, where it is a normal number or NaN.
  float product() const { return fraction * std::bit_cast<float>((exponent + 127) << 23); }

  float fraction;     // exp(r) with |r| <= ln(2) / 2
  uint32_t exponent;  // modulo 2^32 if negative
};

// Results below the smallest normal number become 0, those from 2^127.5 on become infinite.
inline float exponential(float x) {
  const float bounded = x < -87.33f ? 0.0f : ExponentialParts(x).product();
  return x > 88.37f ? std::numeric_limits<float>::infinity() : bounded;
}

// The same for x <= 0, in fewer steps: results stay above 1e-38 instead of becoming 0.
inline float exponential_of_nonpositive(float x) {
  const ExponentialParts parts(x > -87.0f ? x : -87.0f);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(parts.fraction) + (parts.exponent << 23));
}

// Returns a * b, rounded. The compiler may fuse a product with the addition that uses it, and then
// two uses of one product differ. Here it can fuse only this addition, which changes nothing.
template <typename T>
T rounded_product(T a, T b) {
  return a * b + T(0);
}

// Returns exp(score - max), the weight of a key before the division by the sum: at most 1, NaN if
// either is. Every softmax and its gradient compute their weights here, from rounded scores, so
// that the gradient's have the bits of the forward's.
inline float softmax_weight(float score, float max) {
  const float x = (max < score ? max : score) - max;
  return x < -87.33f ? 0.0f : ExponentialParts(x).product();
}
inline double softmax_weight(double score, double max) {
  return std::exp((max < score ? max : score) - max);
}

// Rounds to nearest, NaN to NaN. The conversion of at::BFloat16 has a branch for NaN, with which
// compilers do not vectorise most loops.
template <typename To, typename From>
To round_to(From x) {
  if constexpr (std::is_same_v<To, at::BFloat16> && std::is_same_v<From, float>) {
    const auto bits = std::bit_cast<uint32_t>(x);
    const uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {static_cast<uint16_t>(x != x ? 0x7fc0 : nearest), at::BFloat16::from_bits()};
  } else {
    return static_cast<To>(x);
  }
}

template <typename To, typename From>
void convert(const From* from, To* to, int64_t count) {
  vectorized([=] {
    for (int64_t i = 0; i < count; ++i) {
      to[i] = round_to<To>(from[i]);
    }
  });
}

// The number of rows by which prefetching runs ahead of use.
inline constexpr int64_t kRowsAhead = 3;

// Prefetches `count` elements. Meant for rows in an order that the hardware cannot predict.
// Inlined, because GCC drops calls of functions that only prefetch.
template <typename T>
[[gnu::always_inline]] inline void prefetch([[maybe_unused]] const T* row,
                                            [[maybe_unused]] int64_t count) {
#if defined(__GNUC__)
  constexpr int64_t cache_line = 64 / sizeof(T);
  for (int64_t i = 0; i < count; i += cache_line) {
    __builtin_prefetch(row + i);
  }
#endif
}

// to = factor * from
template <typename From, typename To>
void scale(const From* from, From factor, To* to, int64_t count) {
  vectorized([=] {
    for (int64_t i = 0; i < count; ++i) {
      to[i] = round_to<To>(factor * from[i]);
    }
  });
}

// Returns the sum of so many numbers, in pairs; changes them.
template <int64_t lanes, typename T>
[[gnu::always_inline]] inline T sum_of_lanes(T* sums) {
  if constexpr (lanes == 1) {
    return sums[0];
  } else {
    for (int64_t lane = 0; lane < lanes / 2; ++lane) {
      sums[lane] += sums[lane + lanes / 2];
    }
    return sum_of_lanes<lanes / 2>(sums);
  }
}

// Returns the sum of term(i) over i < count, for use in a vectorized body.
template <typename T, typename Term>
[[gnu::always_inline]] inline T sum_of(int64_t count, const Term& term) {
  // Independent partial sums: the compiler must not reorder a floating-point sum.
  constexpr int64_t lanes = 32;
  constexpr int64_t few = 8;
  T sums[lanes] = {};
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    for (int64_t lane = 0; lane < lanes; ++lane) {
      sums[lane] += term(i + lane);
    }
  }
  for (; i + few <= count; i += few) {
    for (int64_t lane = 0; lane < few; ++lane) {
      sums[lane] += term(i + lane);
    }
  }
  T total = 0;
  for (; i < count; ++i) {
    total += term(i);
  }
  return total + sum_of_lanes<lanes>(sums);
}

// Returns the largest of `least` and of factor * numbers[i], without the NaN among them, for use in
// a body of vectorized that takes the size of vectors.
template <int64_t bytes, typename T>
[[gnu::always_inline]] inline T largest_of(T least, const T* numbers, T factor, int64_t count) {
  // Vectors by hand: Clang does not vectorise the maximum of floating-point numbers.
  typedef T Vector [[gnu::vector_size(bytes)]];
  constexpr int64_t lanes = bytes / sizeof(T);
  Vector vector = Vector{} + least;
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    Vector products;
    __builtin_memcpy(&products, numbers + i, bytes);
    products *= factor;
    vector = products > vector ? products : vector;
  }
  T largest = least;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    largest = vector[lane] > largest ? vector[lane] : largest;
  }
  for (; i < count; ++i) {
    largest = numbers[i] * factor > largest ? numbers[i] * factor : largest;
  }
  return largest;
}

// Returns the sum of a[i] * b[i], accumulated in float, or in double for double.
template <typename T>
auto dot(const T* a, const T* b, int64_t count) {
  using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;
  Sum result = 0;
  vectorized([=, &result] {
    result = sum_of<Sum>(
        count, [=](int64_t i) { return static_cast<Sum>(a[i]) * static_cast<Sum>(b[i]); });
  });
  return result;
}

// to += from
template <typename T>
void add(const T* from, T* to, int64_t count) {
  vectorized([=] {
    for (int64_t i = 0; i < count; ++i) {
      to[i] += from[i];
    }
  });
}

}  // namespace ascend_attn::cpu
