#include "npu/capture.h"

#include <torch_npu/csrc/core/npu/NPUGraphsUtils.h>

namespace ascend_attn::aclnn {

bool is_capturing() {
  return c10_npu::currentStreamCaptureStatusMayInitCtx() != c10_npu::CaptureStatus::None;
}

}  // namespace ascend_attn::aclnn
