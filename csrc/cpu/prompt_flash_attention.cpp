#include "ops/prompt_flash_attention.h"

#include <torch/library.h>

#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "core/error.h"
#include "cpu/common/attention_rows.h"
#include "cpu/common/int8.h"
#include "cpu/prompt_flash_attention_int8.h"
#include "dispatch/operator.h"

namespace ascend_attn::cpu {
namespace {

// Zeroes the rows of `out`, (B, N, Sq, D), past the valid length of their batch.
void zero_padding(const DenseAttention& attention, const at::Tensor& out) {
  for (const auto& sequence : attention.sequences) {
    const int64_t padding = out.size(2) - sequence.queries;
    if (padding > 0) {
      out[sequence.batch].narrow(1, sequence.queries, padding).zero_();
    }
  }
}

template <typename Input, typename Operand, typename Output, typename Convert>
void attend(const DenseAttention& attention, const at::Tensor& out, const Convert& convert) {
  using T = Accumulator<Operand>;
  auto* data = out.mutable_data_ptr<Output>();
  attend_rows<Input, Operand>(attention, [&](const DenseSequence& sequence, int64_t head,
                                             int64_t query, const RowResult<T>& result) {
    auto* row = HeadRows<Output>(data, out, sequence.batch, head, 0).row(query);
    if (result.sum == 0) {
      std::fill_n(row, attention.size, Output(0));
    } else {
      convert(result.out, T(1) / result.sum, head, row);
    }
  });
}

// Rejects scales that are not finite, because saturation would turn them into plausible outputs. It
// also rejects numbers converted to uint64 where the bits of a float32 belong: those bits are a
// float32 of almost 0.
float checked_scale(const char* argument, const at::Tensor& scale) {
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
  check_value(!values || at::isfinite(*values).all().item<bool>(), PromptFlashAttention::name,
              argument, "expected finite numbers, got infinity or NaN among them");
}

void prompt_flash_attention(const PromptFlashAttention& op,
                            PromptFlashAttention::Outputs& outputs) {
  if (op.query.numel() == 0) {
    return;
  }
  std::optional<Int8Scales> scales;
  if (op.query.scalar_type() == at::kChar) {
    scales.emplace(checked_scale("deq_scale1", *op.deq_scale1),
                   checked_scale("quant_scale1", *op.quant_scale1),
                   checked_scale("deq_scale2", *op.deq_scale2));
  }
  check_finite("quant_scale2", op.quant_scale2);
  check_finite("quant_offset2", op.quant_offset2);
  const DenseAttention attention(op);
  const auto& output = std::get<0>(outputs);
  const auto out = op.layout == layout_name(Layout::BNSD_BSND)
                       ? output.transpose(1, 2)
                       : attention.by_head(output, attention.heads);
  zero_padding(attention, out);
  std::optional<OutputQuantization> quantization;
  if (op.quant_scale2) {
    quantization.emplace(*op.quant_scale2, op.quant_offset2, attention.heads * attention.size);
  }
  if (scales) {
    quantized_attention(attention, *scales, quantization, out);
    return;
  }
  dispatch_operand(op.query.scalar_type(), [&]<typename Input, typename Operand>() {
    using T = Accumulator<Operand>;
    if (quantization) {
      attend<Input, Operand, int8_t>(attention, out,
                                     [&](const T* from, T factor, int64_t head, int8_t* to) {
                                       quantization->store(from, factor, head, attention.size, to);
                                     });
    } else {
      attend<Input, Operand, Input>(attention, out,
                                    [&](const T* from, T factor, int64_t, Input* to) {
                                      scale(from, factor, to, attention.size);
                                    });
    }
  });
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<PromptFlashAttention, prompt_flash_attention>(m);
}

}  // namespace
}  // namespace ascend_attn::cpu
