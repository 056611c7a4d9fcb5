#include "ops/quant_lightning_indexer.h"

#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <tuple>

#include "cpu/common/key_selection.h"
#include "dispatch/operator.h"

namespace ascend_attn::cpu {
namespace {

// Products of int8 numbers are exact in bfloat16, and sums of up to 1024 of them in float32.
void quant_lightning_indexer(const QuantLightningIndexer& op,
                             QuantLightningIndexer::Outputs& outputs) {
  const SparseInputs inputs(op);
  const auto& [indices] = outputs;
  indices.fill_(-1);
  const HeadWeights<int8_t> weights(op.weights.to(at::kFloat) * op.query_dequant_scale);
  const auto factors = op.key_dequant_scale.unsqueeze(-1);
  if (has_bfloat16_products()) {
    select_keys<int8_t, at::BFloat16>(inputs, weights, factors, indices, {});
  } else {
    select_keys<int8_t, float>(inputs, weights, factors, indices, {});
  }
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<QuantLightningIndexer, quant_lightning_indexer>(m);
}

}  // namespace
}  // namespace ascend_attn::cpu

void ascend_attn::QuantLightningIndexer::check_values() const {
  const cpu::SparseInputs checked(*this);
}
