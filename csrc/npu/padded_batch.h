// Padded batches of dense attention, in every layout but TND: the device takes lengths in TND
// alone, so that a batch becomes a pack.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "core/sequence_lengths.h"
#include "ops/flash_attention_score.h"

namespace ascend_attn::aclnn {

class PaddedBatch {
 public:
  template <typename Op>
  explicit PaddedBatch(const Op& op) : PaddedBatch(Op::name, op.query, op.key, op.options) {}

  // Whether there is no padding: the call is one without lengths.
  bool complete() const;
  // Returns the pack's call of a forward or a backward.
  template <typename Op>
  Op pack(const Op& op) const {
    auto packed = op;
    packed.options = options(op.options);
    packed.query = queries(op.query);
    packed.key = keys(op.key);
    packed.value = keys(op.value);
    if constexpr (requires { op.dy; }) {
      if (op.dy) {
        packed.dy = queries(*op.dy);
      }
      packed.attention_in = queries(op.attention_in);
      packed.softmax_max = statistics(op.softmax_max);
      packed.softmax_sum = statistics(op.softmax_sum);
      if (op.d_softmax_sum) {
        packed.d_softmax_sum = statistics(*op.d_softmax_sum);
      }
    }
    if constexpr (requires { op.extra; }) {
      if (op.extra.query_rope) {
        packed.extra.query_rope = queries(*op.extra.query_rope);
        packed.extra.key_rope = keys(*op.extra.key_rope);
      }
    }
    return packed;
  }

  // Whether a sequence has both queries and keys. Without one, all results are zero.
  bool has_scores() const;
  // Return what the pack's call writes, where `padded` is the output of the padded one.
  at::Tensor of_queries(const at::Tensor& padded) const {
    return target(padded, query_heads_, &Sequence::queries);
  }
  at::Tensor of_keys(const at::Tensor& padded) const {
    return target(padded, key_heads_, &Sequence::keys);
  }
  at::Tensor of_statistics(const at::Tensor& padded) const;
  // Write what the pack's call has computed, and zeros for the padding.
  void store_queries(const at::Tensor& packed, const at::Tensor& to) const;
  void store_keys(const at::Tensor& packed, const at::Tensor& to) const;
  void store_statistics(const at::Tensor& packed, const at::Tensor& to) const;

 private:
  PaddedBatch(const char* op, const at::Tensor& query, const at::Tensor& key,
              const FlashAttentionOptions& options);

  bool may_have_gaps(const FlashAttentionOptions& options) const;
  FlashAttentionOptions options(const FlashAttentionOptions& given) const;
  at::Tensor queries(const at::Tensor& padded) const {
    return packed(padded, query_heads_, &Sequence::queries);
  }
  at::Tensor keys(const at::Tensor& padded) const {
    return packed(padded, key_heads_, &Sequence::keys);
  }
  at::Tensor statistics(const at::Tensor& padded) const;
  at::Tensor packed(const at::Tensor& padded, int64_t heads, int64_t Sequence::* tokens) const;
  at::Tensor target(const at::Tensor& padded, int64_t heads, int64_t Sequence::* tokens) const;
  int64_t tokens_of_pack(int64_t Sequence::* tokens) const;
  void store(const at::Tensor& packed, const at::Tensor& to, int64_t heads,
             int64_t Sequence::* tokens) const;
  // Views a tensor as (B, S, N, D).
  at::Tensor as_bsnd(const at::Tensor& tensor, int64_t heads) const;
  std::optional<at::Tensor> mask(const FlashAttentionOptions& given) const;
  std::optional<at::Tensor> bias(const FlashAttentionOptions& given) const;
  std::optional<at::Tensor> drop_mask(const FlashAttentionOptions& given) const;

  Layout layout_;
  int64_t query_heads_, key_heads_;
  int64_t query_room_, key_room_;  // the tokens of a batch, with its padding
  std::vector<Sequence> sequences_;
  // Whether the padding stays where it is: sequences without keys, or without queries.
  bool gaps_ = false;
};

}  // namespace ascend_attn::aclnn
