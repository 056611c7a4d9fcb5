// The instructions that CPU kernels use: all that the processor has, unless the environment
// variable ASCEND_ATTN_OPS_CPU_CAPABILITY allows less, so that every path can be run on one
// machine.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ascend_attn::cpu {

// The vector instructions that loops use on this machine.
enum class VectorUnit {
  baseline,  // what the compiler may use everywhere: SSE2 on x86-64, NEON on aarch64
  avx2,
  avx512
};

// Whether loops are compiled for a unit. A build for one machine (setup.py) compiles them for the
// unit of that machine alone.
#if defined(ASCEND_ATTN_OPS_VECTOR_UNIT)
inline constexpr VectorUnit kVectorUnit = VectorUnit::ASCEND_ATTN_OPS_VECTOR_UNIT;
constexpr bool is_built(VectorUnit unit) { return unit == kVectorUnit; }
#else
extern const VectorUnit kVectorUnit;
constexpr bool is_built(VectorUnit) { return true; }
#endif

// Whether nothing is held back. If something is, matrix products use the vector unit alone.
extern const bool kNative;

extern const char* const kCapabilityVariable;

// The text after the colon of "native:float32" in the variable; empty where there is none.
std::string_view wanted_products();

// Returns the names of the built units, as the variable takes them.
std::vector<std::string> built_units();

// Names the vector unit, and the variable if it is set.
std::string vector_unit_name();

// Rejects a value of the variable that is unknown or not built, and a processor without the only
// unit that is built.
void check_capability();

}  // namespace ascend_attn::cpu
