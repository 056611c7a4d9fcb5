// PromptFlashAttention: attention of every query over all keys that a mask keeps, for inference,
// with int8 on either side.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/OptionalArrayRef.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace ascend_attn {

struct PromptFlashAttention {
  static constexpr const char* name = "prompt_flash_attention";
  static constexpr const char* no_gradient =
      "this is an operator for inference; flash_attention_score trains";
  using Outputs = std::tuple<at::Tensor>;
  using OptionalTensor = const std::optional<at::Tensor>&;
  using Signature = Outputs(const at::Tensor&, const at::Tensor&, const at::Tensor&, c10::SymInt,
                            OptionalTensor, at::OptionalSymIntArrayRef, at::OptionalSymIntArrayRef,
                            OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor,
                            OptionalTensor, double, int64_t, int64_t, std::string_view, c10::SymInt,
                            int64_t);

  const at::Tensor& query;
  const at::Tensor& key;
  const at::Tensor& value;
  c10::SymInt num_heads;
  OptionalTensor atten_mask;
  at::OptionalSymIntArrayRef actual_seq_lengths_query;
  at::OptionalSymIntArrayRef actual_seq_lengths_key;
  OptionalTensor deq_scale1;
  OptionalTensor quant_scale1;
  OptionalTensor deq_scale2;
  OptionalTensor quant_scale2;
  OptionalTensor quant_offset2;
  double scale_value;
  int64_t pre_tokens;
  int64_t next_tokens;
  std::string_view layout;
  c10::SymInt num_key_value_heads;
  int64_t sparse_mode;

  Outputs check_and_allocate() const;
};

}  // namespace ascend_attn
