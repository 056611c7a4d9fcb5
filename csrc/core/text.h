// Compile-time string concatenation.
#pragma once

#include <algorithm>
#include <cstddef>

namespace ascend_attn {

template <size_t size>
struct Text {
  char characters[size] = {};

  constexpr operator const char*() const { return characters; }
};

template <size_t... sizes>
consteval auto join(const char (&... parts)[sizes]) {
  // Every part ends in a zero; only one of them is kept.
  Text<(sizes + ...) - sizeof...(sizes) + 1> text;
  auto* end = text.characters;
  ((end = std::copy_n(parts, sizes - 1, end)), ...);
  return text;
}

}  // namespace ascend_attn
