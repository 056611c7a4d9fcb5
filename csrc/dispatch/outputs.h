// Where the outputs of a call come from: new tensors, or the caller's, which the `out=` overload of
// an operator, or the replay of a graph, checks and writes to.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <optional>

#include "core/memory.h"
#include "core/tensor_checks.h"
#include "dispatch/arguments.h"

namespace ascend_attn {

// Gives the outputs of a call one by one, in the order of the schema.
class OutputSource {
 public:
  // Allocates them.
  OutputSource() = default;
  // Takes those of the caller.
  OutputSource(const char* op, const at::Tensor* const* given) : op_(op), given_(given) {}

  // The next output, contiguous and uninitialised. Raises if the caller's is another.
  at::Tensor tensor(c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
    return given_ ? take(sizes, options) : new_tensor(sizes, options);
  }
  // The same with the sizes, dtype and device of `like`, whatever its strides are.
  at::Tensor tensor_like(const at::Tensor& like) {
    return tensor(like.sym_sizes(), like.options());
  }

 private:
  const at::Tensor& take(c10::SymIntArrayRef sizes, const at::TensorOptions& options);

  const char* op_ = nullptr;
  const at::Tensor* const* given_ = nullptr;
  size_t next_ = 0;
};

// The operators of inference, which nothing differentiates.
template <typename Op>
concept HasOutOverload = requires { Op::has_out_overload; };

// The memory that a call of the `out=` overload writes: none of it may be read, or written twice.
class WrittenMemory {
 public:
  // Checks that the outputs do not overlap.
  WrittenMemory(const char* op, const at::Tensor* const* outputs, size_t count);

  void check_apart(Place place, const at::Tensor& read) const;

 private:
  struct Output {
    const at::Tensor& tensor;
    Span bytes;
    size_t index;  // among all outputs
  };

  // Returns the first output that overlaps a tensor; null if none does.
  const Output* find_overlap(const at::Tensor& tensor) const;

  const char* op_;
  c10::SmallVector<Output, 4> outputs_;
};

}  // namespace ascend_attn
