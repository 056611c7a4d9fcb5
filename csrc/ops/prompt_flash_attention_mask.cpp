// Checks of atten_mask, sparse_mode, pre_tokens and next_tokens.
#include <cstdint>

#include "core/error.h"
#include "core/sparse_mode.h"
#include "core/symbolic.h"
#include "ops/prompt_flash_attention_rules.h"

namespace ascend_attn {
void PromptFlashAttentionRules::check_mask() const {
  const int64_t mode = op_.sparse_mode;
  check_inference_mask(op_.atten_mask, mode, op_.pre_tokens, op_.next_tokens,
                       /*rows_are_batches=*/false);
  limits_.rule(prompt_rules::kModeZero, mode == 0, mode);
  limits_.rule(prompt_rules::kAllPreTokens, op_.pre_tokens >= queries_.maybe_as_int().value_or(0),
               op_.pre_tokens, " for Sq = ", queries_);
  limits_.rule(prompt_rules::kNextTokens,
               op_.next_tokens == 0 || op_.next_tokens >= keys_.maybe_as_int().value_or(0),
               op_.next_tokens, " for Skv = ", keys_);
  limits_.rule(prompt_rules::kNextOfMode3, mode != 3 || op_.next_tokens > -INT32_MAX,
               op_.next_tokens);
  if (op_.atten_mask && is_310p()) {
    const auto dtype = op_.atten_mask->scalar_type();
    limits_.rule(prompt_rules::kBoolMask, dtype == at::kBool, dtype_name(dtype));
    limits_.rule(prompt_rules::kMaskSizes, same(queries_, keys_) && divides(128, queries_),
                 "a mask for Sq = ", queries_, ", Skv = ", keys_);
  }
  if (op_.masked()) {
    check_band_of_batches();
  }
}

// A band must intersect the score matrix of every non-empty batch.
void PromptFlashAttentionRules::check_band_of_batches() const {
  const auto mode = static_cast<SparseMode>(op_.sparse_mode);
  if (mode != SparseMode::standard && mode != SparseMode::band) {
    return;
  }
  const int64_t pre = KeptKeys::bounded(op_.pre_tokens);
  const int64_t next = KeptKeys::bounded(op_.next_tokens);
  if (pre >= 0 && next >= 0) {
    return;
  }
  const char* argument = pre < 0 ? "pre_tokens" : "next_tokens";
  const int64_t behind = pre < 0 ? pre : next;
  // Anchored top-left, a negative next_tokens skips queries and a negative pre_tokens skips keys. A
  // band is anchored bottom-right, where it is the other way round.
  const bool skips_queries = (behind == next) == (mode == SparseMode::standard);
  const auto sequences = this->sequences();
  for (size_t b = 0; b < sequences.size(); ++b) {
    const int64_t length = skips_queries ? sequences[b].queries : sequences[b].keys;
    limits_.rule({argument, prompt_rules::kBandOfEmpty.expected},
                 !sequences[b].empty() || -behind < length, behind, " for the ", length, " ",
                 skips_queries ? "queries" : "keys", " of batch ", b);
    check_value(sequences[b].empty() || -behind < length, name_, argument, "expected more than -",
                length, ", the ", skips_queries ? "queries" : "keys", " of batch ", b,
                ", for sparse_mode ", op_.sparse_mode, ", got ", behind);
  }
}

}  // namespace ascend_attn
