// The functions of CANN that take sinks or ropes of dense attention.
#pragma once

#include "ops/flash_attention_score.h"

namespace ascend_attn::aclnn {

// Which parts of a call's SinkAndRopes the device computes.
struct TakenByDevice {
  bool sink = false;
  bool ropes = false;

  bool any() const { return sink || ropes; }
};
TakenByDevice taken_by_device(const FlashAttentionScore& op);
TakenByDevice taken_by_device(const FlashAttentionScoreExtendedGrad& op);

// Compute the call with the parts that the device takes, and without the sink if it does not.
void launch_extended(const FlashAttentionScore& op, TakenByDevice device,
                     const FlashAttentionScore::Outputs& outputs);
void launch_extended_grad(const FlashAttentionScoreExtendedGrad& op, TakenByDevice device,
                          const FlashAttentionScoreExtendedGrad::Outputs& outputs);

}  // namespace ascend_attn::aclnn
