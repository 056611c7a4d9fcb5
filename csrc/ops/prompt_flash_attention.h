// PromptFlashAttention: attention over all keys that the mask keeps, for inference, with optional
// int8 inputs and outputs.
#pragma once

#include <array>
#include <tuple>

#include "core/sparse_mode.h"
#include "dispatch/arguments.h"
#include "dispatch/outputs.h"

namespace ascend_attn {

struct OperatorLimits;

struct PromptFlashAttention {
  static constexpr const char* name = "prompt_flash_attention";
  static constexpr const char* schema =
      "(Tensor query, Tensor key, Tensor value, *, SymInt? num_heads=None, "
      "Tensor? atten_mask=None, Tensor? actual_seq_lengths_query=None, "
      "Tensor? actual_seq_lengths_key=None, "
      "Tensor? deq_scale1=None, Tensor? quant_scale1=None, Tensor? deq_scale2=None, "
      "Tensor? quant_scale2=None, Tensor? quant_offset2=None, float? scale_value=None, "
      "int pre_tokens=2147483647, int next_tokens=2147483647, str layout, "
      "SymInt num_key_value_heads=0, int sparse_mode=0) -> Tensor out";
  // The second one on Ascend 950.
  static constexpr std::array functions{"aclnnPromptFlashAttentionV3",
                                        "aclnnFusedInferAttentionScoreV5"};
  static const OperatorLimits limits;
  static constexpr const char* no_gradient =
      "this is an operator for inference; flash_attention_score trains";
  using Outputs = std::tuple<at::Tensor>;
  static constexpr bool has_out_overload = true;

  at::Tensor query, key, value;
  std::optional<c10::SymInt> num_heads;
  std::optional<at::Tensor> atten_mask;
  Lengths actual_seq_lengths_query, actual_seq_lengths_key;
  std::optional<at::Tensor> deq_scale1, quant_scale1, deq_scale2, quant_scale2, quant_offset2;
  std::optional<double> scale_value;
  int64_t pre_tokens, next_tokens;
  LayoutArgument layout;
  c10::SymInt num_key_value_heads;
  int64_t sparse_mode;

  Outputs check_and_allocate(OutputSource outputs = {}) const;
  void check_values() const;
  bool lacks_defaults() const { return !num_heads || !scale_value; }
  PromptFlashAttention with_defaults() const;

  // With the defaults of a call, these are given.
  const c10::SymInt& heads() const { return *num_heads; }
  double scale() const { return *scale_value; }
  // Whether the sparse_mode excludes keys: the compressed mask of modes 2 to 4 may be absent.
  bool masked() const {
    return atten_mask || has_compressed_mask(static_cast<SparseMode>(sparse_mode));
  }
};

}  // namespace ascend_attn
