#include "cpu/common/matrix_products.h"

#include <ATen/native/CPUBlas.h>

#include <algorithm>
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
  if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0) {
    processor.avx512_bf16 = (eax >> 5 & 1) != 0;
  }
  // torch packs bfloat16 for AMX alone, and asks the system for its registers.
  processor.amx = at::native::cpublas::could_pack(at::kBFloat16);
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
  return {MatrixProducts::bfloat16, "the default"};
}

ProductChoice choose() {
  if (const auto wanted = products_named(wanted_products())) {
    return {*wanted, kCapabilityVariable};
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

}  // namespace ascend_attn::cpu
