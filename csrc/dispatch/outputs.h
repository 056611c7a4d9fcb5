// Where the outputs of a call come from: new tensors, or the caller's, which the form `out` of an
// operator checks and writes to.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <optional>

#include "core/memory.h"
#include "core/tensor_checks.h"

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

// An operator with a form `out`.
template <typename Op>
concept HasOutForm =
    requires(const Op& op, OutputSource outputs) { op.check_and_allocate(outputs); };

// The memory that a call of the form `out` writes: none of it may be read, or written twice.
class WrittenMemory {
 public:
  // Checks that the outputs do not overlap.
  WrittenMemory(const char* op, const at::Tensor* const* outputs, size_t count);

  // Check an argument, at a position of the schema.
  void check_apart(size_t position, const at::Tensor& read) const {
    check_apart(position, kNotInList, read);
  }
  void check_apart(size_t position, const std::optional<at::Tensor>& read) const {
    if (read) {
      check_apart(position, kNotInList, *read);
    }
  }
  void check_apart(size_t position, at::TensorList read) const {
    for (size_t i = 0; i < read.size(); ++i) {
      check_apart(position, static_cast<int64_t>(i), read[i]);
    }
  }
  template <typename T>
  void check_apart(size_t, const T&) const {}

 private:
  struct Output {
    const at::Tensor& tensor;
    Span bytes;
    size_t index;  // among all outputs
  };

  // Returns the first output that overlaps a tensor; null if none does.
  const Output* find_overlap(const at::Tensor& tensor) const;
  void check_apart(size_t position, int64_t index, const at::Tensor& read) const;

  const char* op_;
  c10::SmallVector<Output, 4> outputs_;
};

}  // namespace ascend_attn
