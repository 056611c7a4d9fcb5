// Checks of the scales and the offset of int8 inputs and outputs.
#include <c10/util/Half.h>

#include <array>
#include <cmath>
#include <limits>
#include <span>

#include "core/error.h"
#include "core/sparse_mode.h"
#include "core/symbolic.h"
#include "ops/prompt_flash_attention_rules.h"

namespace ascend_attn {
void PromptFlashAttentionRules::check_quantization() const {
  const std::array<NamedOptionalTensor, 5> all{{{"deq_scale1", op_.deq_scale1},
                                                {"quant_scale1", op_.quant_scale1},
                                                {"deq_scale2", op_.deq_scale2},
                                                {"quant_scale2", op_.quant_scale2},
                                                {"quant_offset2", op_.quant_offset2}}};
  for (const auto& [argument, tensor] : all) {
    if (tensor) {
      limits_.rule({argument, prompt_rules::kNoScales.expected, k310P}, false, "a tensor");
      check_device(name_, {argument, *tensor}, query());
    }
  }
  const auto dtype = dtype_name(op_.query.scalar_type());
  for (const auto& [argument, tensor] : std::span(all).first(3)) {
    check_present(!is_int8() || tensor, name_, argument,
                  "expected a tensor, as int8 inputs need deq_scale1, quant_scale1 and "
                  "deq_scale2, got None");
    check_value(is_int8() || !tensor, name_, argument, "expected None for inputs of dtype ", dtype,
                ", which take quant_scale2 and quant_offset2 alone, got a tensor");
  }
  check_value(op_.quant_scale2 || !op_.quant_offset2, name_, "quant_offset2",
              "expected None without quant_scale2, which makes the output int8, got a tensor");
  if (is_int8()) {
    constexpr int64_t kMostElements = std::numeric_limits<int32_t>::max() / (128 * 128);
    check_value(head_size_.maybe_as_int().value_or(0) <= kMostElements, name_, "query",
                "expected a head size of at most ", kMostElements,
                " in int8, whose products are summed in int32, got ", head_size_);
    check_scales_of_inputs();
  }
  if (op_.quant_scale2) {
    check_scales_of_output();
    check_every_row_has_keys();
  }
}

void PromptFlashAttentionRules::check_scales_of_inputs() const {
  const NamedTensor first{"deq_scale1", *op_.deq_scale1};
  const NamedTensor second{"deq_scale2", *op_.deq_scale2};
  const NamedTensor middle{"quant_scale1", *op_.quant_scale1};
  const auto dtype = first.tensor.scalar_type();
  check_type(dtype == at::kUInt64 || dtype == at::kFloat, name_, first.name,
             "expected dtype uint64 or float32, got ", dtype_name(dtype));
  check_dtype(name_, second, first);
  check_dtype(name_, middle, at::kFloat);
  for (const auto& argument : {first, middle, second}) {
    check_value(same(argument.tensor.sym_numel(), 1), name_, argument.name,
                "expected one value for the whole tensor, got shape ", argument.tensor.sym_sizes());
  }
  const auto scale = static_cast<float>(static_cast<c10::Half>(static_cast<float>(op_.scale())));
  check_value(std::isfinite(scale), name_, "scale_value",
              "expected what float16 can represent for int8 inputs, whose scores are float16, got ",
              op_.scale());
}

void PromptFlashAttentionRules::check_scales_of_output() const {
  const NamedTensor scale{"quant_scale2", *op_.quant_scale2};
  const auto dtype = scale.tensor.scalar_type();
  const auto input = op_.query.scalar_type();
  const bool from_half = input == at::kHalf || input == at::kBFloat16;
  check_type(dtype == at::kFloat || (from_half && dtype == input), name_, scale.name,
             "expected dtype float32", from_half ? " or " : "", from_half ? dtype_name(input) : "",
             ", got ", dtype_name(dtype));
  const auto channels = heads_ * head_size_;
  const auto count = scale.tensor.sym_numel();
  const bool per_tensor = may_equal(count, 1);
  check_value(per_tensor || same(count, channels), name_, scale.name,
              "expected one value, or one per channel, N * D = ", channels, ", got shape ",
              scale.tensor.sym_sizes());
  check_value(per_tensor || divides(32, head_size_), name_, scale.name,
              "expected one value unless D is a multiple of 32, got shape ",
              scale.tensor.sym_sizes(), " for D = ", head_size_);
  if (op_.quant_offset2) {
    const NamedTensor offset{"quant_offset2", *op_.quant_offset2};
    check_dtype(name_, offset, scale);
    check_shape(name_, offset, scale.tensor.sym_sizes(), "of quant_scale2");
  }
}

void PromptFlashAttentionRules::check_every_row_has_keys() const {
  const auto mode = static_cast<SparseMode>(op_.sparse_mode);
  const int64_t pre = KeptKeys::bounded(op_.pre_tokens);
  const int64_t next = KeptKeys::bounded(op_.next_tokens);
  if (mode == SparseMode::band) {
    check_value(pre >= 0, name_, "pre_tokens",
                "expected at least 0 for sparse_mode 4 with an int8 output, got ", op_.pre_tokens);
    check_value(next >= 0, name_, "next_tokens",
                "expected at least 0 for sparse_mode 4 with an int8 output, got ", op_.next_tokens);
  }
  if (!op_.quant_offset2 || (mode == SparseMode::standard && !op_.atten_mask)) {
    return;
  }
  if (mode == SparseMode::standard) {
    check_value(next >= 0, name_, "quant_offset2",
                "expected None where rows have no keys, got a tensor for sparse_mode 0 and "
                "next_tokens ",
                op_.next_tokens, "; quantise the float output instead");
  }
  const auto sequences = this->sequences();
  for (size_t b = 0; b < sequences.size(); ++b) {
    const int64_t shift = sequences[b].keys - sequences[b].queries;
    const bool without_keys = (mode == SparseMode::standard && -shift - pre > 0) ||
                              (mode == SparseMode::right_down_causal && shift < 0) ||
                              (mode == SparseMode::band && next + shift < 0);
    check_value(!without_keys, name_, "quant_offset2",
                "expected None where rows have no keys, got a tensor for sparse_mode ",
                op_.sparse_mode, ", Sq = ", sequences[b].queries, ", Skv = ", sequences[b].keys,
                " of batch ", b, "; quantise the float output instead");
  }
}

}  // namespace ascend_attn
