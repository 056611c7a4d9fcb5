#include "cpu/common/matrix_products.h"

#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <string_view>

#include "cpu/common/capability.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

namespace ascend_attn::cpu {
namespace {

constexpr std::string_view kNames[] = {"bfloat16", "float32", "portable"};

std::optional<MatrixProducts> products_named(std::string_view name) {
  const auto* found = std::ranges::find(kNames, name);
  if (found == std::end(kNames)) {
    return std::nullopt;
  }
  return static_cast<MatrixProducts>(found - std::begin(kNames));
}

struct Processor {
  std::string vendor;
  unsigned family = 0;
  unsigned model = 0;
  bool avx512_bf16 = false;
  bool amx = false;
};

Processor this_processor() {
  Processor processor;
#if defined(__x86_64__) && defined(__GNUC__)
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) != 0) {
    for (const unsigned letters : {ebx, edx, ecx}) {
      for (unsigned shift = 0; shift < 32; shift += 8) {
        processor.vendor += static_cast<char>(letters >> shift & 0xff);
      }
    }
  }
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0) {
    const unsigned family = eax >> 8 & 0xf;
    processor.family = family == 0xf ? family + (eax >> 20 & 0xff) : family;
    processor.model = (eax >> 4 & 0xf) | (eax >> 12 & 0xf0);
  }
  if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0) {
    processor.avx512_bf16 = (eax >> 5 & 1) != 0;
  }
  // torch packs bfloat16 for AMX alone, and asks the system for its registers.
  processor.amx = at::native::cpublas::could_pack(at::kBFloat16);
#elif defined(__aarch64__)
  std::ifstream("/sys/devices/system/cpu/cpu0/regs/identification/midr_el1") >> processor.vendor;
  processor.vendor = "aarch64 " + processor.vendor;
#endif
  return processor;
}

// From measurements (docs/performance.md). Intel's processors with AVX512_BF16 and without AMX, or
// whose AMX a virtual machine hides, multiply bfloat16 at about half of float32's rate.
ProductChoice choice_by_family(const Processor& processor) {
  if (processor.amx) {
    return {MatrixProducts::bfloat16, "AMX"};
  }
  if (processor.vendor == "GenuineIntel" && processor.avx512_bf16) {
    return {MatrixProducts::float32, "Intel, AVX512_BF16 without AMX"};
  }
  if (processor.vendor == "AuthenticAMD" && processor.avx512_bf16) {
    return {MatrixProducts::bfloat16, "AMD, AVX512_BF16"};
  }
  return {MatrixProducts::bfloat16,
          "the default; `python -m ascend_attn_ops calibrate` measures this processor"};
}

std::optional<MatrixProducts> measured_choice() {
  std::ifstream file(measured_choices_file());
  const std::string begin = processor_name() + '\t';
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(begin)) {
      return products_named(std::string_view(line).substr(begin.size()));
    }
  }
  return std::nullopt;
}

ProductChoice choose() {
  if (const auto wanted = products_named(wanted_products())) {
    return {*wanted, kCapabilityVariable};
  }
  if (const auto measured = measured_choice()) {
    return {*measured, "measured, " + measured_choices_file()};
  }
  return choice_by_family(this_processor());
}

}  // namespace

const ProductChoice& product_choice() {
  static const ProductChoice choice = choose();
  return choice;
}

std::string name_of(MatrixProducts products) {
  return std::string(kNames[static_cast<size_t>(products)]);
}

std::string processor_name() {
  const auto processor = this_processor();
  if (processor.family == 0) {
    return processor.vendor;
  }
  return processor.vendor + " family " + std::to_string(processor.family) + " model " +
         std::to_string(processor.model) + (processor.avx512_bf16 ? ", AVX512_BF16" : "") +
         (processor.amx ? ", AMX" : "");
}

std::string measured_choices_file() {
  const auto folder = [](const char* variable) {
    const char* value = std::getenv(variable);
    return std::string(value == nullptr ? "" : value);
  };
  const std::string config = folder("XDG_CONFIG_HOME");
  const std::string home = folder("HOME");
  if (config.empty() && home.empty()) {
    return "";
  }
  return (config.empty() ? home + "/.config" : config) + "/ascend_attn_ops/matrix_products";
}

}  // namespace ascend_attn::cpu
