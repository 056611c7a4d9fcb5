// Additions of FlashAttentionScore V3, V4 and V5 and their gradients: sinks, separate rotated parts
// of query and key, and another order of the statistics.
#pragma once

#include <ATen/core/TensorBody.h>

#include "opapi/ours/flash_attention_score.h"

namespace cann_sim {

inline const Arguments kRopeTensors{kQuery, optional_input("queryRopeOptional", "", {ACL_BF16}),
                                    kKey, optional_input("keyRopeOptional", "", {ACL_BF16}),
                                    kValue};
inline const Arguments kSink{optional_input("sinkOptional", "", kFloat)};
inline const Arguments kSoftmaxLayout{attribute("softmaxLayout")};

// Query and key with their rotated parts behind them, as one head of both.
at::Tensor with_rope(const Call& call, std::string_view name, std::string_view rope);

// The statistics of packed sequences stand as (N, S_b, 8), one sequence behind the other, or with
// `softmaxLayout` "same_as_input" as the tokens do: (T, N, 8).
bool statistics_like_tokens(const Call& call);
at::Tensor to_order_of_tokens(const Call& call, const at::Tensor& statistics);
at::Tensor to_order_of_sequences(const Call& call, const at::Tensor& statistics);

// A tensor in the input layout as (..., N, D), and a statistic as (..., N), in the same order.
at::Tensor heads_last(const Call& call, const at::Tensor& x);
at::Tensor statistic_of_heads(const Call& call, const at::Tensor& statistics);
// The sink of every row.
at::Tensor sinks_like(const Call& call, const at::Tensor& statistics);

// For versions that have ropes, sinks and an order of the statistics: the output and the
// statistics, and dq, dk, dv and the gradients of both ropes and of the sinks. `others` are
// arguments of the operator that the call does not have itself.
torch::jit::Stack attention_with_all(const Call& call, OperatorArguments others = {});
torch::jit::Stack gradients_with_all(const Call& call, OperatorArguments others = {});

// The bits of a dropout that keeps elements with this probability: those of a byte from the lowest,
// 1 for what is kept. The same seed and offset give the same bits, as the backward expects; the
// device's own are others.
at::Tensor dropout_bits(int64_t seed, int64_t offset, double keep, int64_t bytes);

}  // namespace cann_sim
