// Argument checks of FlashAttentionScore and its gradients.
#pragma once

#include <c10/core/SymInt.h>

#include <string_view>
#include <vector>

#include "ops/dense_shape.h"
#include "ops/flash_attention_score.h"

namespace ascend_attn {

// A call takes no more sequences on a device.
inline constexpr int64_t kMostSequences = 2048;

// Rules of devices. A direction obeys those that its table of limits lists.

inline constexpr Rule kPaddedPack{"actual_seq_lengths_query",
                                  "both lists of lengths to end with 0 (100, 200, 0) where query "
                                  "and key have padding rows beside slopes or a mask of every "
                                  "sequence",
                                  kA2A3.since(Cann::v9_0)};
inline constexpr Rule kPseOfTypeZero{"pse_shift", "a tensor for pse_type 0", kA2A3};
inline constexpr Rule kPsePerKeyOfGradient{
    "pse_shift", "(B, N, 1, Skv) instead of (1, N, 1, Skv) for a batch size B > 1"};
inline constexpr Rule kCausalTokens{
    "next_tokens",
    "0, and pre_tokens of at least Sq, for sparse_mode 0 beside the pse_shift of 1024 rows", kA2A3};
inline constexpr Rule kQueriesOfMode3{
    "sparse_mode", "no sequence with more queries than keys for sparse_mode 3 in layout TND", k950};
inline constexpr Rule kBandPreTokens{"pre_tokens", "at least 0 for sparse_mode 4 in layout TND"};
inline constexpr Rule kBandPreTokensOn950{"pre_tokens", "at least 0 for sparse_mode 4", k950};
inline constexpr Rule kBandNextTokensOn950{
    "next_tokens", "at least Sq - Skv of every sequence for sparse_mode 4 in layout TND", k950};
inline constexpr Rule kQueriesOfMode7{"sparse_mode",
                                      "no sequence with more queries than keys for sparse_mode 7"};
inline constexpr Rule kBandOfMode7{"next_tokens",
                                   "at least Sq - Skv of the last sequence for sparse_mode 7"};
inline constexpr Rule kTokensOfGradient{
    "pre_tokens", "pre_tokens + next_tokens of at least 0, also without an atten_mask", kA2A3};
inline constexpr Rule kTokensOfPackedGradient{
    "pre_tokens", "pre_tokens + next_tokens of at least 1 for sparse_mode 0 and 4 in layout TND",
    kA2A3};
inline constexpr Rule kSlopesOfMode7{"pse_type", "0 or 1 for sparse_mode 7"};
inline constexpr Rule kSlopesOfMode8{
    "pse_type", "0 or 1 for sparse_mode 8, unless every sequence after the first has Sq = Skv"};
inline constexpr Rule kSlopesOfMode8Band{
    "q_start_idx",
    "Sq + q_start_idx = Skv + kv_start_idx in the first sequence for pse_type 2 and 3 in "
    "sparse_mode 8"};
inline constexpr Rule kSlopesOn950{
    "pse_type", "0 or 1, unless every sequence in layout TND has Sq = Skv", k950};
// The kernel computes other sequences wrong.
inline constexpr Rule kKeysOn950{kKeyLengths, "a key for every sequence with queries in layout TND",
                                 k950};
inline constexpr Rule kDropoutOn950{"drop_mask", "None in the gradient", k950};

// Checks one call. Every method raises on the first violated rule.
class FlashAttentionRules : DenseShape {
 public:
  // Checks `query`, `key`, `value`, num_heads, layout and the lengths.
  template <typename Op>
  explicit FlashAttentionRules(const Op& op)
      : FlashAttentionRules(Op::name, Op::limits, op.query, op.key, op.value, op.options) {}

  void check_extra(const SinkAndRopes& extra);
  void check_head_size() const;  // against the device's limit
  void check_scores() const;     // pse_shift, pse_type, scale_value and the start indices
  void check_mask() const;       // atten_mask, sparse_mode, prefix, pre_tokens, next_tokens
  void check_dropout() const;    // drop_mask, keep_prob
  void check_like_out(NamedTensor argument) const;
  void check_statistics(NamedTensor argument) const;

  at::Tensor out(OutputSource& outputs) const;
  at::Tensor statistics(OutputSource& outputs) const;

 private:
  FlashAttentionRules(std::string_view op, const OperatorLimits& limits, const at::Tensor& query,
                      const at::Tensor& key, const at::Tensor& value,
                      const FlashAttentionOptions& options);

  void check_lengths();
  void check_keys_of_queries() const;
  void check_counts() const;
  void check_count(const c10::SymInt& sequences) const;
  void check_pse_tensor() const;
  void check_packed_pse_tensor() const;
  void check_pse_slopes() const;
  void check_start(const char* argument, const OptionalIntListField& list) const;
  void check_slopes_of_sequences() const;
  void check_mask_tensor() const;
  void check_full_mask() const;
  void check_compressed_mask() const;
  void check_prefix() const;
  void check_band(const Sequence& sequence) const;
  void check_bands_of_sequences() const;
  void check_token_sum() const;
  void check_no_more_queries(const Rule& rule, const std::vector<Sequence>& sequences) const;

  // Checks a rule of the device, if it is one of this direction.
  template <typename... Got>
  void check_rule(const Rule& rule, bool holds, const Got&... got) const {
    if (!holds && obeys(rule)) [[unlikely]] {
      limits_.rule(rule, holds, got...);
    }
  }
  bool obeys(const Rule& rule) const;

  // In layout TND: the longest sequence, and the tokens of all; of lengths that are known.
  int64_t longest_query() const { return longest(query_ends_); }
  int64_t longest_key() const { return longest(key_ends_); }
  int64_t key_sum() const { return key_ends_.empty() ? 0 : key_ends_.back(); }
  int64_t query_sum() const { return query_ends_.empty() ? 0 : query_ends_.back(); }

  c10::SymDimVector out_sizes() const { return query_sizes(layout_, value_size_); }

  const FlashAttentionOptions& options_;
  const OperatorLimits& table_;
  // In layout TND: the cumulative lengths, without a 0 that closes both lists.
  c10::ArrayRef<int64_t> query_ends_, key_ends_;
};

}  // namespace ascend_attn
