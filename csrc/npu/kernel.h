// Shared by the NPU kernels. Each kernel launches one aclnn function and declares its C prototype
// next to it: that of the first phase, without the trailing (uint64_t* workspaceSize,
// aclOpExecutor** executor) that all have. The second phase is always (void* workspace, uint64_t
// workspaceSize, aclOpExecutor*, aclrtStream).
//
// Functions are looked up by name, so that building needs no CANN headers and loading no CANN
// libraries.
#pragma once

#include <c10/core/SymIntArrayRef.h>
#include <c10/util/OptionalArrayRef.h>

#include <algorithm>

#include "core/determinism.h"
#include "core/device_in_force.h"
#include "core/error.h"
#include "core/tensor_checks.h"
#include "core/value_checks.h"
#include "dispatch/operator.h"
#include "dispatch/registration.h"
#include "npu/aclnn/launcher.h"
#include "npu/capture.h"

namespace ascend_attn {

// Returns whether the values of a call can be read. Neither the capture nor an update of a graph
// can wait for the device: a warning says so, once.
bool can_read_values(const char* op);

// Computes, in the checked mode after checking the values of the call: those that the CPU checks,
// and by `rules` those that the CPU accepts and the device cannot read.
template <typename Op, auto compute, auto... rules>
void check_and_compute(const Op& op, typename Op::Outputs& outputs) {
  if (checks_values() && can_read_values(Op::name)) [[unlikely]] {
    op.check_values();
    (rules(op), ...);
  }
  compute(op, outputs);
}

// Registers the kernel of an operator whose values can be wrong.
template <typename Op, auto compute, auto... rules>
void register_checked_kernel(torch::Library& library) {
  register_kernel<Op, &check_and_compute<Op, compute, rules...>>(library);
}

// `<operator>.relaunch`: the operator with outputs and a workspace of its caller. A graph needs it
// that updates the lengths of a call: the call is launched again and must write where the first one
// did (python/ascend_attn_ops/_npu_graphs.py).
template <typename Op, auto compute>
void relaunch(const Op& op, const at::Tensor& workspace, at::TensorList out) {
  OutCall<Op> call{op, {}};
  check_value(out.size() == call.outputs.size(), Op::name, "out", "expected ", call.outputs.size(),
              " tensors, got ", out.size());
  std::ranges::transform(out, call.outputs.begin(), [](const at::Tensor& t) { return &t; });
  check_tensors_given(call);
  auto outputs = op.check_and_allocate(call.source());
  const aclnn::GivenWorkspace scope(&workspace);
  compute(op, outputs);
}

// The overload in the dispatcher. npu/relaunch.cpp instantiates it.
template <typename Op, typename Signature = SignatureOf<Op>>
struct Relaunch;
template <typename Op, typename Outputs, typename... Parameters>
struct Relaunch<Op, Outputs(Parameters...)> {
  static void register_kernel(torch::Library& library,
                              void (*kernel)(Parameters..., const at::Tensor&, at::TensorList));
};

template <typename Op, auto compute>
void register_kernel_and_relaunch(torch::Library& library) {
  constexpr auto checked = &check_and_compute<Op, compute>;
  register_kernel<Op, checked>(library);
  Relaunch<Op>::register_kernel(
      library,
      &Kernel<Op, &relaunch<Op, checked>>::template call<const at::Tensor&, at::TensorList>);
}

// Fills an output before the launch. The kernels leave padding rows unwritten, which hold this
// value on the CPU. The host does not know these rows without waiting for the device; a mask of
// them would read the whole output as well as write it.
inline void fill_output(const at::Tensor& output, const at::Scalar& value) {
  if (output.numel() != 0) {
    output.fill_(value);
  }
}

// The same for a value that is one byte, repeated. The launch itself fills small outputs, as in a
// decoding step: a launch of their own would cost the host more than the call.
inline void add_fill(aclnn::Fills& fills, const at::Tensor& output, int8_t value) {
  // Above, a kernel is expected to write faster than a memset does.
  constexpr size_t kMostBytes = size_t{4} << 20;
  if (output.nbytes() > kMostBytes || aclnn::is_capturing()) {
    fill_output(output, value);
  } else if (output.numel() != 0) {
    fills.push_back({output.mutable_data_ptr(), output.nbytes(), static_cast<uint8_t>(value)});
  }
}

}  // namespace ascend_attn
