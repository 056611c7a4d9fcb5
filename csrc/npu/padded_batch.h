// Padded batches of dense attention, in every layout but TND: the device takes lengths in TND
// alone, so that a batch becomes a pack.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "core/sequence_lengths.h"
#include "npu/packing.h"
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
    packed.query = rows(kQueries, op.query);
    packed.key = rows(kKeys, op.key);
    packed.value = rows(kKeys, op.value);
    if constexpr (requires { op.dy; }) {
      if (op.dy) {
        packed.dy = rows(kQueries, *op.dy);
      }
      packed.attention_in = rows(kQueries, op.attention_in);
      packed.softmax_max = statistics(op.softmax_max);
      packed.softmax_sum = statistics(op.softmax_sum);
      if (op.d_softmax_sum) {
        packed.d_softmax_sum = statistics(*op.d_softmax_sum);
      }
    }
    if constexpr (requires { op.extra; }) {
      if (op.extra.query_rope) {
        packed.extra.query_rope = rows(kQueries, *op.extra.query_rope);
        packed.extra.key_rope = rows(kKeys, *op.extra.key_rope);
      }
    }
    return packed;
  }

  // Whether a sequence has both queries and keys. Without one, all results are zero.
  bool has_scores() const;
  // An output has rows of queries or of keys, or statistics, or neither.
  enum class Axes { queries, keys, statistics, none };
  // Computes the pack's call, and writes its results, and zeros for the padding, to `outputs`.
  template <typename Op, typename Compute, size_t count>
  void compute(const Op& op, const typename Op::Outputs& outputs, const Compute& compute,
               const Axes (&axes)[count]) const {
    [&]<size_t... i>(std::index_sequence<i...>) {
      typename Op::Outputs results{target(std::get<i>(outputs), axes[i])...};
      compute(pack(op), results);
      (store(std::get<i>(results), std::get<i>(outputs), axes[i]), ...);
    }(std::make_index_sequence<count>());
  }

 private:
  PaddedBatch(const char* op, const at::Tensor& query, const at::Tensor& key,
              const FlashAttentionOptions& options);

  bool may_have_gaps(const FlashAttentionOptions& options) const;
  FlashAttentionOptions options(const FlashAttentionOptions& given) const;
  at::Tensor rows(TokensOf tokens, const at::Tensor& padded) const;
  at::Tensor statistics(const at::Tensor& padded) const;
  // Returns what the pack's call writes, where `padded` is the output of the padded one.
  at::Tensor target(const at::Tensor& padded, Axes axes) const;
  int64_t tokens_of_pack(TokensOf tokens) const;
  void store(const at::Tensor& packed, const at::Tensor& to, Axes axes) const;
  void store_rows(TokensOf tokens, const at::Tensor& packed, const at::Tensor& to) const;
  void store_statistics(const at::Tensor& packed, const at::Tensor& to) const;
  // Views a tensor as (B, S, N, D).
  at::Tensor as_bsnd(TokensOf tokens, const at::Tensor& tensor) const;
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
