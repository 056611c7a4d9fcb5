#include "ops/kv_quant_sparse_flash_attention.h"

#include <torch/library.h>

#include "cpu/common/packed_rows.h"
#include "cpu/common/read_slots.h"
#include "cpu/common/selected_attention.h"
#include "cpu/common/sparse_inputs.h"
#include "dispatch/operator.h"

namespace ascend_attn::cpu {
namespace {

void kv_quant_sparse_flash_attention(const KvQuantSparseFlashAttention& op,
                                     KvQuantSparseFlashAttention::Outputs& outputs) {
  const SparseInputs inputs(op, Selectable::all_keys);
  const auto& out = std::get<0>(outputs);
  inputs.zero_unused({out});
  dispatch_operand(out.scalar_type(), [&]<typename Input, typename Operand>() {
    attend_to_selected_keys<PackedInputs<Input>, Operand>(inputs, op.scale_value, out, {}, {});
  });
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<KvQuantSparseFlashAttention, kv_quant_sparse_flash_attention>(m);
}

}  // namespace
}  // namespace ascend_attn::cpu

void ascend_attn::KvQuantSparseFlashAttention::check_values() const {
  cpu::check_nothing_behind_gaps(name, cpu::SparseInputs(*this, cpu::Selectable::all_keys));
}
