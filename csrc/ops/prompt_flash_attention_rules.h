// Argument checks of PromptFlashAttention.
#pragma once

#include "ops/dense_shape.h"
#include "ops/prompt_flash_attention.h"

namespace ascend_attn {

namespace prompt_rules {
inline constexpr Rule kNotEmptyInt8{"query", "B, Sq and Skv of at least 1 for int8 inputs", kA2A3};
inline constexpr Rule kBandOfEmpty{
    "pre_tokens, next_tokens", "a band that meets every batch, also one without queries or keys,"};
inline constexpr Rule kNextOfMode3{"next_tokens", "more than -2147483647 in sparse_mode 3", kA2A3};

inline constexpr Rule kAlignedSize{"query", "a D that is a multiple of 16 in layout BNSD_BSND",
                                   k950};
inline constexpr Rule kAlignedSizeInt8{
    "query", "a D that is a multiple of 32 in layout BNSD_BSND for an int8 output", k950};

inline constexpr Rule kNoScales{"deq_scale1, quant_scale1, deq_scale2, quant_scale2, quant_offset2",
                                "None", k310P};
inline constexpr Rule kModeZero{"sparse_mode", "0", k310P};
inline constexpr Rule kAllPreTokens{"pre_tokens", "at least Sq", k310P};
inline constexpr Rule kNextTokens{"next_tokens", "0, or at least Skv,", k310P};
inline constexpr Rule kBoolMask{"atten_mask", "dtype bool", k310P};
inline constexpr Rule kMaskSizes{"atten_mask", "None unless Sq = Skv, a multiple of 128,", k310P};
inline constexpr Rule kKeyHeads{"num_key_value_heads", "0 or num_heads", k310P};
inline constexpr Rule kNoQueryLengths{"actual_seq_lengths_query", "None", k310P};
inline constexpr Rule kNoKeyLengths{"actual_seq_lengths_key", "None", k310P};
}  // namespace prompt_rules

// Checks one call. Every method raises on the first violated rule.
class PromptFlashAttentionRules : DenseShape {
 public:
  // Checks `query`, `key`, `value`, their layout and heads, and the lengths.
  explicit PromptFlashAttentionRules(const PromptFlashAttention& op);

  void check_mask() const;          // atten_mask, sparse_mode, pre_tokens, next_tokens
  void check_quantization() const;  // the scales and the offset
  at::Tensor out(OutputSource& outputs) const;

 private:
  void check_limits() const;
  void check_band_of_batches() const;

  void check_scales_of_inputs() const;
  void check_scales_of_output() const;
  // Needed for int8 outputs with an offset: a row without keys is zero, not the offset.
  void check_every_row_has_keys() const;

  bool is_int8() const { return op_.query.scalar_type() == at::kChar; }
  bool is_310p() const { return limits_.on(k310P); }

  const PromptFlashAttention& op_;
};

}  // namespace ascend_attn
