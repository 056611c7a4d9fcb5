// Graphs: torch.npu.NPUGraph.
#pragma once

namespace ascend_attn::aclnn {

// Whether calls on the current stream become part of a graph instead of running.
bool is_capturing();

}  // namespace ascend_attn::aclnn
