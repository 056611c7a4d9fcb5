// The rules of PromptFlashAttention.
#pragma once

#include <c10/core/SymInt.h>

#include <vector>

#include "core/layout.h"
#include "core/limits.h"
#include "core/sequence_lengths.h"
#include "core/tensor_checks.h"
#include "ops/prompt_flash_attention.h"

namespace ascend_attn {

// Checks one call. Every method raises on the first rule that is violated.
class PromptAttentionRules {
 public:
  // `query`, `key`, `value`, their layout and heads, and the lengths.
  explicit PromptAttentionRules(const PromptFlashAttention& op);

  void mask() const;          // atten_mask, sparse_mode, pre_tokens, next_tokens
  void quantization() const;  // the scales and the offset
  at::Tensor new_out() const;

 private:
  void tensors() const;
  void heads();
  void sizes();
  // Its number of heads, which the argument `number` gives, and their size.
  void agrees(TensorArgument argument, const char* number, const c10::SymInt& heads) const;
  void limits() const;

  void full_mask() const;
  void compressed_mask() const;
  void band() const;

  void scales_of_inputs() const;
  void scales_of_output() const;
  // A row without keys is zero, and not its offset.
  void every_row_has_keys() const;

  bool is_int8() const { return op_.query.scalar_type() == at::kChar; }
  bool is_310p() const { return limits_.product() == Product::P310; }
  TensorArgument query() const { return {"query", op_.query}; }
  // Of every batch; none while one of them is symbolic.
  std::vector<Lengths> sequence_lengths() const;

  const PromptFlashAttention& op_;
  Layout layout_;
  LimitsCheck limits_;
  c10::SymInt batch_, queries_, keys_;
  c10::SymInt key_heads_, size_;
};

}  // namespace ascend_attn
