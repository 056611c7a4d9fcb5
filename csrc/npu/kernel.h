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
#include <torch/library.h>

#include <algorithm>
#include <concepts>
#include <limits>
#include <tuple>

#include "core/determinism.h"
#include "core/device_in_force.h"
#include "core/error.h"
#include "core/tensor_checks.h"
#include "core/value_checks.h"
#include "dispatch/operator.h"
#include "npu/aclnn/launcher.h"

namespace ascend_attn {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Returns whether the values of a call can be read. Neither the capture nor an update of a graph
// can wait for the device: a warning says so, once.
bool can_read_values(const char* op);

// Returns a copy of numbers on a device, without waiting for it.
at::Tensor to_device(const at::Tensor& on_host, const at::Tensor& like);

// Returns the lengths at a position of the schema as the device reads them, in int32. Lengths on
// the host are copied without waiting.
DeviceLengths launched_lengths(const char* op, size_t position, const DeviceLengths& lengths,
                               const at::Tensor& query);

// Calls `compute` with lengths that the device can read.
template <typename Op, auto compute>
void compute_with_launched_lengths(const Op& op, typename Op::Outputs& outputs) {
  bool all_launched = true;
  const auto& query = std::get<0>(arguments_of(op));
  const auto is_launched = [&]<typename Field>(const Field& field) {
    if constexpr (std::same_as<Field, DeviceLengths>) {
      all_launched =
          all_launched &&
          (!field || (field->scalar_type() == at::kInt && field->device() == query.device()));
    }
  };
  std::apply([&](const auto&... fields) { (is_launched(fields), ...); }, arguments_of(op));
  if (all_launched) [[likely]] {
    compute(op, outputs);
    return;
  }
  size_t position = 0;
  const auto launched = [&]<typename Field>(const Field& field) -> Field {
    const auto at = position++;
    if constexpr (std::same_as<Field, DeviceLengths>) {
      return launched_lengths(Op::name, at, field, query);
    } else {
      return field;
    }
  };
  compute(map_fields(op, launched), outputs);
}

// Computes, in the checked mode after checking the values of the call.
template <typename Op, auto compute>
void check_and_compute(const Op& op, typename Op::Outputs& outputs) {
  if (checks_values() && can_read_values(Op::name)) [[unlikely]] {
    op.check_values();
  }
  compute(op, outputs);
}

// Refuses lengths of a device where the host cannot wait for it.
void check_not_captured(const char* op, size_t position, const Lengths& lengths);

template <typename Op>
void check_not_captured(const Op& op) {
  if constexpr (kReadsLengths<Op>) {
    for_each_lengths(op, [](const Lengths& lengths, size_t position) {
      if (lengths.waits()) [[unlikely]] {
        check_not_captured(Op::name, position, lengths);
      }
    });
  }
}
template <typename Op, auto compute>
typename Op::Outputs run_unless_captured(const Op& op) {
  check_not_captured(op);
  return run<Op, compute>(op);
}
template <typename Op, auto compute>
void register_npu_kernel(torch::Library& library) {
  register_function<Op, &run_unless_captured<Op, compute>>(library);
  if constexpr (HasOutOverload<Op>) {
    register_out_function<Op, &run_into<Op, compute>>(library);
  }
}

// Registers the kernel of an operator whose values can be wrong.
template <typename Op, auto compute>
void register_checked_kernel(torch::Library& library) {
  constexpr auto checked = &check_and_compute<Op, compute>;
  register_npu_kernel<Op, &compute_with_launched_lengths<Op, checked>>(library);
}

// `<operator>.relaunch`: the operator with outputs and a workspace of its caller. A graph needs it
// that updates the lengths of a call: the call is launched again and must write where the first one
// did (python/ascend_attn_ops/_core/npu_graphs.py).
template <typename Op, auto compute>
void relaunch(const Op& given, const at::Tensor& workspace, at::TensorList out) {
  check_not_captured(given);
  with_defaults(given, [&](const Op& op) {
    OutCall<Op> call{op, {}};
    check_value(out.size() == call.outputs.size(), Op::name, "out", "expected ",
                call.outputs.size(), " tensors, got ", out.size());
    std::ranges::transform(out, call.outputs.begin(), [](const at::Tensor& t) { return &t; });
    check_tensors_given(call);
    auto outputs = op.check_and_allocate(call.source());
    const aclnn::GivenWorkspace scope(&workspace);
    compute_in_int32<Op, compute>(op, outputs);
  });
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
  register_npu_kernel<Op, checked>(library);
  Relaunch<Op>::register_kernel(
      library, &DispatcherKernel<Op, &relaunch<Op, checked>>::template call<const at::Tensor&,
                                                                            at::TensorList>);
}

// Fills an output before the launch. The kernels leave padding rows unwritten, which hold this
// value on the CPU. The host does not know these rows without waiting for the device; a mask of
// them would read the whole output as well as write it.
inline void fill_output(const at::Tensor& output, const at::Scalar& value) {
  if (output.defined() && output.numel() != 0) {
    output.fill_(value);
  }
}
template <typename... Outputs>
void fill_outputs(const std::tuple<Outputs...>& outputs, const at::Scalar& value) {
  std::apply([&](const auto&... output) { (fill_output(output, value), ...); }, outputs);
}

// Fills one output with a byte, repeated. The launch itself fills small ones, as in a decoding
// step: a launch of their own would cost the host more than the call.
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
