// Which matrix products the kernels use on this processor. Its instructions alone do not tell: on
// some processors bfloat16 products are slower than float32 ones.
//
// The choice is made once in a process, never by timing a call: two runs, or two ranks, would then
// round differently. The first of these decides:
//   1. ASCEND_ATTN_OPS_CPU_CAPABILITY=native:float32 and the like
//   2. what is known of the processor
#pragma once

#include <string>

namespace ascend_attn::cpu {

enum class MatrixProducts {
  bfloat16,  // of bfloat16 tensors as they are; float16 is widened to float32
  float32,   // bfloat16 is widened as well
  portable   // as float32, by this library's own loops instead of torch's
};

struct ProductChoice {
  MatrixProducts products;
  std::string reason;
};

const ProductChoice& product_choice();
std::string name_of(MatrixProducts products);

}  // namespace ascend_attn::cpu
