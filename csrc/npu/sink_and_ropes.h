// Sinks and ropes of dense attention, by functions of CANN that know neither.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "core/layout.h"
#include "npu/aclnn/arguments.h"
#include "ops/flash_attention_score.h"

namespace ascend_attn::aclnn {

// Returns the number of key heads in any layout.
int64_t key_heads_of(const at::Tensor& query, const at::Tensor& key, Layout layout, int64_t heads);

// Returns a view of (B, S, N, D), (B, S, H) or (S, B, H) as (B, N, S, D).
at::Tensor as_bnsd(const at::Tensor& tensor, Layout layout, int64_t heads);

// Returns the call with the ropes behind the heads of query and key.
FlashAttentionScore join_ropes(const FlashAttentionScore& op);

// Computes the gradients of a call with ropes by `differentiate`, which gets joined heads.
void differentiate_joined(const FlashAttentionScoreExtendedGrad& op,
                          const FlashAttentionScoreExtendedGrad::Outputs& outputs,
                          void (*differentiate)(const FlashAttentionScoreExtendedGrad&,
                                                FlashAttentionScoreExtendedGrad::Outputs&));

// Adds the sink to the results of attention without one, given the cumulative lengths of layout
// TND. A gradient that knows no sink is right with these results: it rebuilds the weights from the
// statistics.
void add_sink(const FlashAttentionScore& op, const FlashAttentionScore::Outputs& outputs,
              const IntegerList& query_ends);

// Computes the gradient of the sink.
void differentiate_sink(const FlashAttentionScoreExtendedGrad& op, const at::Tensor& d_sink,
                        const IntegerList& query_ends);

// Returns the call whose gradients, but that of value, are those of softmax_sum alone: with values
// of 0 and dy of e1, the gradient of the scores is P * d_lse where attention_in is -d_lse * e1.
FlashAttentionScoreExtendedGrad call_of_statistics(const FlashAttentionScoreExtendedGrad& op);

}  // namespace ascend_attn::aclnn
