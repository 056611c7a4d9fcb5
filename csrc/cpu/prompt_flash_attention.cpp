#include "ops/prompt_flash_attention.h"

#include <torch/library.h>

#include <bit>

#include "core/error.h"
#include "core/tensor_checks.h"
#include "cpu/common/attention_rows.h"
#include "dispatch/operator.h"

namespace ascend_attn::cpu {
namespace {

// Reads a scalar scale: float32, or uint64, whose low half is a float32 of which the upper 19 bits
// count.
float read_scale(const at::Tensor& scale) {
  if (scale.scalar_type() == at::kUInt64) {
    const auto bits = static_cast<uint32_t>(*scale.const_data_ptr<uint64_t>());
    return std::bit_cast<float>(bits & 0xFFFFE000u);
  }
  return *scale.const_data_ptr<float>();
}

// Rejects scales that are not finite, because saturation would turn them into plausible outputs. It
// also rejects numbers converted to uint64 where the bits of a float32 belong: those bits are a
// float32 of almost 0.
float checked_scale(const char* argument, const at::Tensor& given) {
  const auto scale = on_host(given);
  const float value = read_scale(scale);
  if (scale.scalar_type() == at::kUInt64) {
    check_value(std::isnormal(value), PromptFlashAttention::name, argument,
                "expected the bits of a float32, finite and not 0, got the integer ",
                *scale.const_data_ptr<uint64_t>());
  } else {
    check_value(std::isfinite(value), PromptFlashAttention::name, argument,
                "expected a finite number, got ", value);
  }
  return value;
}

void check_finite(const char* argument, const std::optional<at::Tensor>& values) {
  check_value(!values || on_host(*values).isfinite().all().item<bool>(), PromptFlashAttention::name,
              argument, "expected finite numbers, got infinity or NaN among them");
}

// Checks all scales and returns those of int8 inputs.
std::optional<Int8Scales> scales_of(const PromptFlashAttention& op) {
  std::optional<Int8Scales> scales;
  if (op.query.scalar_type() == at::kChar) {
    scales.emplace(checked_scale("deq_scale1", *op.deq_scale1),
                   checked_scale("quant_scale1", *op.quant_scale1),
                   checked_scale("deq_scale2", *op.deq_scale2));
  }
  check_finite("quant_scale2", op.quant_scale2);
  check_finite("quant_offset2", op.quant_offset2);
  return scales;
}

void prompt_flash_attention(const PromptFlashAttention& op,
                            PromptFlashAttention::Outputs& outputs) {
  if (op.query.numel() == 0) {
    return;
  }
  const auto scales = scales_of(op);
  const DenseAttention attention(op);
  const auto& output = std::get<0>(outputs);
  DenseOutputs to;
  to.out = op.layout == layout_name(Layout::BNSD_BSND) ? output.transpose(1, 2)
                                                       : attention.by_head(output, attention.heads);
  if (op.quant_scale2) {
    to.quantization.emplace(*op.quant_scale2, op.quant_offset2, attention.heads * attention.size);
  }
  attention.fill_padding(to.out, 0);
  scales ? attend_int8(attention, *scales, to) : attend(attention, to);
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<PromptFlashAttention, prompt_flash_attention>(m);
}

}  // namespace
}  // namespace ascend_attn::cpu

void ascend_attn::PromptFlashAttention::check_values() const {
  if (query.numel() != 0) {
    cpu::scales_of(*this);
    const cpu::DenseAttention checked(*this);
  }
}
