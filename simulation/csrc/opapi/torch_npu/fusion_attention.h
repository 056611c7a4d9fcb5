// Additions of FlashAttentionScore V3, V4 and V5 and their gradients: sinks, separate rotated parts
// of query and key, and another order of the statistics.
#pragma once

#include <ATen/core/TensorBody.h>

#include "opapi/ours/flash_attention_score.h"

namespace cann_sim {

inline const Arguments kRopeTensors{
    kQuery, optional_input("queryRopeOptional", "query_rope", {ACL_BF16}), kKey,
    optional_input("keyRopeOptional", "key_rope", {ACL_BF16}), kValue};
inline const Arguments kSink{optional_input("sinkOptional", "sink", kFloat)};
inline const Arguments kSoftmaxLayout{attribute("softmaxLayout")};

// The statistics of packed sequences stand as (N, S_b, 8), one sequence behind the other, or with
// `softmaxLayout` "same_as_input" as the tokens do: (T, N, 8).
bool statistics_like_tokens(const Call& call);
at::Tensor to_order_of_tokens(const Call& call, const at::Tensor& statistics);
at::Tensor to_order_of_sequences(const Call& call, const at::Tensor& statistics);

// For versions that have an order of the statistics: the results of the operator. `others` are
// arguments of the operator that the call does not have itself.
torch::jit::Stack attention_with_all(const Call& call, const OperatorArguments& others = {});
torch::jit::Stack gradients_with_all(const Call& call, OperatorArguments others = {});

// The bits of a dropout that keeps elements with this probability: those of a byte from the lowest,
// 1 for what is kept. The same seed and offset give the same bits, as the backward expects; the
// device's own are others.
at::Tensor dropout_bits(int64_t seed, int64_t offset, double keep, int64_t bytes);

}  // namespace cann_sim
