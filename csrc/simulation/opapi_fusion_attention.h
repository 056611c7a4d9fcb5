// What FlashAttentionScore V3, V4 and V5 and their gradients add: sinks, the rotated parts of query
// and key apart from the rest, and another order of the statistics.
#pragma once

#include <ATen/core/TensorBody.h>

#include "opapi_flash_attention_score.h"

namespace cann_sim {

inline const Arguments kRopeTensors{kQuery, optional_input("queryRopeOptional", "", kHalfOrFloat),
                                    kKey, optional_input("keyRopeOptional", "", kHalfOrFloat),
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

}  // namespace cann_sim
