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

VectorUnit wanted_unit() {
  const auto* level = wanted_level();
  return level == nullptr ? unit_of_processor() : std::min(level->unit, unit_of_processor());
}

}  // namespace

const char* const kCapabilityVariable = "ASCEND_ATTN_OPS_CPU_CAPABILITY";
#if !defined(ASCEND_ATTN_OPS_VECTOR_UNIT)
const VectorUnit kVectorUnit = wanted_unit();
#endif
const bool kNative = wanted_level() == nullptr;

std::string_view wanted_products() {
  constexpr size_t begin = kNativeName.size() + 1;
  return wanted().starts_with("native:") ? wanted().substr(begin) : std::string_view();
}

std::vector<std::string> built_units() {
  std::vector<std::string> names;
  for (const auto& level : kLevels) {
    if (is_built(level.unit)) {
      names.emplace_back(level.name);
    }
  }
  return names;
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
  if (built_units().size() < std::size(kLevels)) {
    name += ", the only one built";
  }
  return kNative ? name : name + " (" + kCapabilityVariable + "=" + std::string(wanted()) + ")";
}

void check_capability() {
  if (unit_of_processor() < kVectorUnit) {
    throw std::invalid_argument(
        "ascend_attn_ops._C is built for processors with " + built_units().front() +
        " alone, and this one has none; build it here: `make build`, or for every processor: "
        "pip install --no-build-isolation --no-deps .");
  }
  if (wanted() == kNativeName || (wanted_level() != nullptr && is_built(wanted_unit())) ||
      std::ranges::find(kNativeProducts, wanted_products()) != std::end(kNativeProducts)) {
    return;
  }
  std::string message =
      std::string(kCapabilityVariable) + "=" + std::string(wanted()) + ": expected ";
  for (const auto& unit : built_units()) {
    message += unit + " or ";
  }
  message += kNativeName;
  for (const auto& products : kNativeProducts) {
    message += " or native:" + std::string(products);
  }
  throw std::invalid_argument(message);
}

}  // namespace ascend_attn::cpu
