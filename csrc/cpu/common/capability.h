// The instructions that CPU kernels use: all that the processor has, unless the environment
// variable ASCEND_ATTN_OPS_CPU_CAPABILITY allows less, so that every path can be run on one
// machine.
#pragma once

#include <string>
#include <string_view>

namespace ascend_attn::cpu {

// The vector instructions that a build for any machine uses on this one.
enum class VectorUnit {
  baseline,  // what the compiler may use everywhere: SSE2 on x86-64, NEON on aarch64
  avx2,
  avx512
};
extern const VectorUnit kVectorUnit;

// Whether nothing is held back. If something is, matrix products use the vector unit alone.
extern const bool kNative;

extern const char* const kCapabilityVariable;

// The text after the colon of "native:float32" in the variable; empty where there is none.
std::string_view wanted_products();

// Names the vector unit, and the variable if it is set.
std::string vector_unit_name();

// Rejects an unknown value of the variable.
void check_capability();

}  // namespace ascend_attn::cpu
