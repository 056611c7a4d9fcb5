#include "cpu/common/capability.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

namespace ascend_attn::cpu {
namespace {

constexpr std::string_view kNativeName = "native";
constexpr std::string_view kNativeProducts[] = {"bfloat16", "float32", "portable"};

struct Level {
  std::string_view name;
  VectorUnit unit;
};
#if defined(__x86_64__)
constexpr Level kLevels[] = {
    {"baseline", VectorUnit::baseline}, {"avx2", VectorUnit::avx2}, {"avx512", VectorUnit::avx512}};
#else
constexpr Level kLevels[] = {{"baseline", VectorUnit::baseline}};
#endif

std::string_view wanted() {
  const char* value = std::getenv(kCapabilityVariable);
  return value == nullptr || *value == '\0' ? kNativeName : value;
}

// Returns null for kNativeName with or without products, and for an unknown name.
const Level* wanted_level() {
  const auto* level = std::ranges::find(kLevels, wanted(), &Level::name);
  return level == std::end(kLevels) ? nullptr : level;
}

VectorUnit unit_of_processor() {
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  const auto has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const auto has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512cd") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return !has_avx2 ? VectorUnit::baseline : has_avx512 ? VectorUnit::avx512 : VectorUnit::avx2;
#else
  return VectorUnit::baseline;
#endif
}

VectorUnit vector_unit() {
  const auto* level = wanted_level();
  return level == nullptr ? unit_of_processor() : std::min(level->unit, unit_of_processor());
}

}  // namespace

const char* const kCapabilityVariable = "ASCEND_ATTN_OPS_CPU_CAPABILITY";
const VectorUnit kVectorUnit = vector_unit();
const bool kNative = wanted_level() == nullptr;

std::string_view wanted_products() {
  constexpr size_t begin = kNativeName.size() + 1;
  return wanted().starts_with("native:") ? wanted().substr(begin) : std::string_view();
}

std::string vector_unit_name() {
  std::string name = "the compiler's baseline";
#if defined(__x86_64__)
  name = kVectorUnit == VectorUnit::avx512 ? "AVX512"
         : kVectorUnit == VectorUnit::avx2 ? "AVX2"
                                           : "SSE2";
#elif defined(__aarch64__)
  name = "NEON";
#endif
  return kNative ? name : name + " (" + kCapabilityVariable + "=" + std::string(wanted()) + ")";
}

void check_capability() {
  if (wanted() == kNativeName || wanted_level() != nullptr ||
      std::ranges::find(kNativeProducts, wanted_products()) != std::end(kNativeProducts)) {
    return;
  }
  std::string message =
      std::string(kCapabilityVariable) + "=" + std::string(wanted()) + ": expected ";
  for (const auto& level : kLevels) {
    message += std::string(level.name) + " or ";
  }
  message += kNativeName;
  for (const auto& products : kNativeProducts) {
    message += " or native:" + std::string(products);
  }
  throw std::invalid_argument(message);
}

}  // namespace ascend_attn::cpu
