#include "core/lengths.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>

#include "core/error.h"
#include "core/tensor_checks.h"

namespace ascend_attn {
namespace {

template <typename T>
std::vector<int64_t> read_as(const at::Tensor& tensor) {
  const auto* data = tensor.const_data_ptr<T>();
  const int64_t stride = tensor.stride(0);
  std::vector<int64_t> values(tensor.numel());
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = data[static_cast<int64_t>(i) * stride];
  }
  return values;
}

}  // namespace

// Every call with lists makes them: the dispatcher would take as long as the rest of it.
at::Tensor lengths_tensor(c10::ArrayRef<int64_t> values) {
  at::Tensor tensor = at::detail::empty_cpu({static_cast<int64_t>(values.size())}, at::kLong);
  std::ranges::copy(values, tensor.mutable_data_ptr<int64_t>());
  return tensor;
}

Lengths::Lengths(const std::vector<int64_t>& values)
    : optional(lengths_tensor(values)),
      values_(std::make_shared<const std::vector<int64_t>>(values)) {}

bool Lengths::given() const { return has_value() && (*this)->sym_numel().maybe_as_int() != 0; }

bool Lengths::known() const { return !has_value() || !(*this)->is_meta(); }

c10::ArrayRef<int64_t> Lengths::values() const {
  if (!has_value()) {
    return {};
  }
  if (!values_) {
    const auto tensor = on_host(**this);
    values_ = std::make_shared<const std::vector<int64_t>>(
        tensor.scalar_type() == at::kInt ? read_as<int32_t>(tensor) : read_as<int64_t>(tensor));
  }
  return *values_;
}

void raise_not_readable(std::string_view op, std::string_view argument, const at::Tensor& lengths,
                        const at::Tensor& query) {
  const auto dtype = lengths.scalar_type();
  check_type(dtype == at::kInt || dtype == at::kLong, op, argument,
             "expected whole numbers, as a list or as a tensor of int32 or int64, got a tensor of ",
             dtype_name(dtype), " ", lengths.sym_sizes());
  check_type(lengths.dim() == 1, op, argument,
             "expected whole numbers, as a list or as a tensor of one axis, got a tensor of shape ",
             lengths.sym_sizes());
  check_value(lengths.sym_numel().maybe_as_int().value_or(0) <= kMostLengths, op, argument,
              "expected at most ", kMostLengths, " lengths, got ", lengths.sym_numel());
  raise(Violation::value, op, argument,
        c10::str("expected a tensor on the host or on ", query.device(), " (query's), got one on ",
                 lengths.device()));
}

}  // namespace ascend_attn
