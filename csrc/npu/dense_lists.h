// Lists on the host, and masks, that the launches of dense attention share.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "npu/aclnn/arguments.h"
#include "npu/aclnn/launcher.h"
#include "ops/flash_attention_score.h"

namespace ascend_attn::aclnn {

// The device computes the band in int32 and wraps around. Beyond that range a number bounds
// nothing.
int64_t within_int32(int64_t tokens);

// The lists of a call, on the host.
struct DenseLists {
  DenseLists(const at::Tensor& query, const at::Tensor& key, const FlashAttentionOptions& options);

  IntegerList prefix, query_ends, key_ends;

 private:
  void mark_padding(const at::Tensor& query, const at::Tensor& key,
                    const FlashAttentionOptions& options);
};

// Returns the mask that the device gets.
std::optional<at::Tensor> launched_mask(const char* op, const at::Tensor& query,
                                        const at::Tensor& key, const FlashAttentionOptions& options,
                                        const DenseLists& lists);
// Returns pse_shift with an axis of all heads.
std::optional<at::Tensor> launched_bias(const FlashAttentionOptions& options);
// Lets a launch clear the padding rows of a gradient first. Where a pack is closed, the kernels of
// A2 and A3 divide these rows among the wrong number of cores, and leave some.
void clear_padding(Fills& fills, const IntegerList& ends, const at::Tensor& gradient);

}  // namespace ascend_attn::aclnn
