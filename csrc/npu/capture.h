// Graphs: torch.npu.NPUGraph.
#pragma once

#include <torch_npu/csrc/core/npu/NPUGraphsUtils.h>

namespace ascend_attn::aclnn {

// Whether calls on the current stream become part of a graph instead of running.
inline bool is_capturing() {
  return c10_npu::currentStreamCaptureStatusMayInitCtx() != c10_npu::CaptureStatus::None;
}

}  // namespace ascend_attn::aclnn
