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

at::Tensor to_device(const at::Tensor& on_host, const at::Tensor& like) {
  // From pinned memory: the copy does not wait.
  return on_host.pin_memory().to(like.device(), on_host.scalar_type(), /*non_blocking=*/true);
}

DeviceLengths launched_lengths(const char* op, size_t position, const DeviceLengths& lengths,
                               const at::Tensor& query) {
  if (!lengths) {
    return lengths;
  }
  const auto narrow = as_int32(*lengths);
  if (!lengths->is_cpu()) {
    return lengths.moved_to(narrow);
  }
  check_implemented(!aclnn::is_capturing(), op, argument_name(op, position),
                    "expected a tensor on ", query.device(),
                    " in a call that a graph captures, got one on the host, which a replay cannot "
                    "change");
  return lengths.moved_to(to_device(narrow.contiguous(), query));
}

void check_not_captured(const char* op, size_t position, const Lengths& lengths) {
  check_implemented(!aclnn::is_capturing(), op, argument_name(op, position),
                    "expected a tensor on the host in a call that a graph captures, got one on ",
                    lengths->device(), ", which the host cannot read before it runs");
}

}  // namespace ascend_attn
