// The lengths of sequences, as operators take them: a tensor of one axis, int32 or int64, on the
// host or on the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace ascend_attn {

// A list of lengths as a tensor on the host.
at::Tensor lengths_tensor(c10::ArrayRef<int64_t> values);

class Lengths : public std::optional<at::Tensor> {
 public:
  Lengths() = default;
  Lengths(std::nullopt_t) {}
  Lengths(std::optional<at::Tensor> tensor) : optional(std::move(tensor)) {}
  Lengths(at::Tensor tensor) : optional(std::move(tensor)) {}
  // The lengths of a call that an operator makes itself.
  Lengths(const std::vector<int64_t>& values);

  // Whether there are any. A tensor without elements counts as missing: torch_npu passes those to
  // aclnn. A symbolic number of them is not looked at.
  bool given() const;
  c10::SymInt count() const { return has_value() ? (*this)->sym_numel() : c10::SymInt(0); }

  // Whether they can be read: fake tensors have no values.
  bool known() const;
  // The values; none if they are absent. The first call reads them, and waits for the device that
  // has them. Copies share what was read.
  c10::ArrayRef<int64_t> values() const;
  // Whether values() waits for a device.
  bool waits() const { return has_value() && !values_ && !(*this)->is_cpu(); }

 protected:
  mutable std::shared_ptr<const std::vector<int64_t>> values_;
};

// Lengths that the device's function takes as a tensor.
class DeviceLengths : public Lengths {
 public:
  using Lengths::Lengths;

  // The same numbers in another tensor.
  DeviceLengths moved_to(at::Tensor tensor) const {
    if ((*this)->is_cpu()) {
      values();
    }
    DeviceLengths moved(std::move(tensor));
    moved.values_ = values_;
    return moved;
  }
};

inline constexpr int64_t kMostLengths = std::numeric_limits<int32_t>::max();

// Whether lengths have one axis and an integer dtype, are on the host or on the device of `query`,
// and can be copied: an expanded tensor may have any number.
inline bool are_readable(const Lengths& lengths, const at::Tensor& query) {
  if (!lengths) {
    return true;
  }
  const auto dtype = lengths->scalar_type();
  return (dtype == at::kInt || dtype == at::kLong) && lengths->dim() == 1 &&
         lengths->sym_numel().maybe_as_int().value_or(0) <= kMostLengths &&
         (lengths->is_cpu() || lengths->device() == query.device());
}
[[noreturn]] void raise_not_readable(std::string_view op, std::string_view argument,
                                     const at::Tensor& lengths, const at::Tensor& query);

}  // namespace ascend_attn
