// PromptFlashAttention: attention over all keys that the mask keeps, for inference, with optional
// int8 inputs and outputs.
#pragma once

#include <array>
#include <tuple>

#include "dispatch/arguments.h"
#include "dispatch/outputs.h"

namespace ascend_attn {

struct OperatorLimits;

struct PromptFlashAttention {
  static constexpr const char* name = "prompt_flash_attention";
  static constexpr const char* schema =
      "(Tensor query, Tensor key, Tensor value, *, SymInt num_heads, Tensor? atten_mask=None, "
      "SymInt[]? actual_seq_lengths_query=None, SymInt[]? actual_seq_lengths_key=None, "
      "Tensor? deq_scale1=None, Tensor? quant_scale1=None, Tensor? deq_scale2=None, "
      "Tensor? quant_scale2=None, Tensor? quant_offset2=None, float scale_value, "
      "int pre_tokens=2147483647, int next_tokens=0, str layout=\"BSH\", "
      "SymInt num_key_value_heads=0, int sparse_mode=0) -> Tensor out";
  // The second one on Ascend 950.
  static constexpr std::array functions{"aclnnPromptFlashAttentionV3",
                                        "aclnnFusedInferAttentionScoreV5"};
  static const OperatorLimits limits;
  static constexpr const char* no_gradient =
      "this is an operator for inference; flash_attention_score trains";
  using Outputs = std::tuple<at::Tensor>;

  at::Tensor query, key, value;
  c10::SymInt num_heads;
  std::optional<at::Tensor> atten_mask;
  OptionalIntListField actual_seq_lengths_query, actual_seq_lengths_key;
  std::optional<at::Tensor> deq_scale1, quant_scale1, deq_scale2, quant_scale2, quant_offset2;
  double scale_value;
  int64_t pre_tokens, next_tokens;
  LayoutArgument layout;
  c10::SymInt num_key_value_heads;
  int64_t sparse_mode;

  Outputs check_and_allocate(OutputSource outputs = {}) const;
  void check_values() const;
};

}  // namespace ascend_attn
