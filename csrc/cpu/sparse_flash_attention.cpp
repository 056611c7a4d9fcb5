#include "ops/sparse_flash_attention.h"

#include <torch/library.h>

#include "cpu/common/read_slots.h"
#include "cpu/common/selected_attention.h"
#include "cpu/common/sparse_inputs.h"
#include "dispatch/operator.h"

namespace ascend_attn::cpu {
namespace {

void sparse_flash_attention(const SparseFlashAttention& op,
                            SparseFlashAttention::Outputs& outputs) {
  const SparseInputs inputs(op, Selectable::all_keys);
  const auto& out = std::get<0>(outputs);
  const auto& softmax_max = std::get<1>(outputs);
  const auto& softmax_sum = std::get<2>(outputs);
  inputs.zero_unused({out, softmax_max, softmax_sum});
  dispatch_operand(out.scalar_type(), [&]<typename Input, typename Operand>() {
    attend_to_selected_keys<SequenceInputs<Input>, Operand>(inputs, op.options.scale_value, out,
                                                            softmax_max, softmax_sum);
  });
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<SparseFlashAttention, sparse_flash_attention>(m);
}

}  // namespace
}  // namespace ascend_attn::cpu

void ascend_attn::SparseFlashAttention::check_values() const {
  cpu::check_nothing_behind_gaps(name, cpu::SparseInputs(*this, cpu::Selectable::all_keys));
}
