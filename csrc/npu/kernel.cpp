#include "npu/kernel.h"

#include <c10/util/Exception.h>

namespace ascend_attn {

bool can_read_values(const char* op) {
  const bool of_graph = aclnn::is_capturing() || aclnn::GivenWorkspace::current();
  if (of_graph) {
    TORCH_WARN_ONCE("ascend::", op,
                    ": the values of calls in a graph are not checked, since neither a capture nor "
                    "an update can wait for the device; check the same calls without the graph");
  }
  return !of_graph;
}

}  // namespace ascend_attn
