// Which memory a tensor has. Operators that write to tensors of the caller refuse those that
// overlap what they read; and one tensor may stand for two arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "core/symbolic.h"

namespace ascend_attn {

// Returns whether two tensors are the same elements in the same memory.
inline bool same_elements(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_same(b)) {
    return true;
  }
  return a.defined() && b.defined() && a.has_storage() && b.has_storage() && a.is_alias_of(b) &&
         a.dtype() == b.dtype() && known_equal(a.sym_storage_offset(), b.sym_storage_offset()) &&
         std::ranges::equal(a.sym_sizes(), b.sym_sizes(), known_equal) &&
         std::ranges::equal(a.sym_strides(), b.sym_strides(), known_equal);
}

// A half-open range of bytes.
struct Span {
  const char* begin = nullptr;
  const char* end = nullptr;

  bool meets(const Span& other) const { return begin < other.end && other.begin < end; }
};

// As many dense blocks, all of one size, at one distance.
struct Blocks {
  Span first;
  int64_t count = 0;
  int64_t stride = 0;

  int64_t bytes() const { return first.end - first.begin; }

  bool meet(const Span& span) const {
    // The first block that ends behind the beginning of the span.
    const auto behind = span.begin - first.end;
    const auto block = behind < 0 ? 0 : behind / stride + 1;
    return block < count && first.begin + block * stride < span.end;
  }

  // Returns whether the blocks of two tensors alternate, as those of two slices of one buffer do.
  bool alternate_with(const Blocks& other) const {
    if (stride != other.stride) {
      return false;
    }
    const auto distance = (other.first.begin - first.begin) % stride;
    const auto from = distance < 0 ? distance + stride : distance;
    return from >= bytes() && from + other.bytes() <= stride;
  }
};

// The memory of a tensor's elements; none of the sizes is 0.
class Elements {
 public:
  Elements(const char* first, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t itemsize)
      : sizes_(sizes), strides_(strides), itemsize_(itemsize) {
    int64_t last = 0;
    for (size_t axis = 0; axis < sizes.size(); ++axis) {
      last += (sizes[axis] - 1) * strides[axis];
    }
    span_ = {first, first + (last + 1) * itemsize};
  }

  const Span& span() const { return span_; }

  // Returns whether any element is in a block. A span is too coarse if strides leave gaps.
  bool any_in(const Blocks& other) const {
    bool found = other.meet(span_);
    if (found && !sizes_.empty()) {
      found = false;
      for (int64_t i = 0; !found && i < sizes_[0]; ++i) {
        const auto* first = span_.begin + i * strides_[0] * itemsize_;
        found = Elements(first, sizes_.slice(1), strides_.slice(1), itemsize_).any_in(other);
      }
    }
    return found;
  }

 private:
  at::IntArrayRef sizes_;
  at::IntArrayRef strides_;
  int64_t itemsize_;
  Span span_;
};

// Where the elements of a tensor are whose storage begins at `storage`; none of an empty tensor.
inline std::optional<Elements> elements_of(const at::Tensor& tensor, const void* storage) {
  if (tensor.numel() == 0) {
    return std::nullopt;
  }
  const auto itemsize = static_cast<int64_t>(tensor.itemsize());
  return Elements(static_cast<const char*>(storage) + tensor.storage_offset() * itemsize,
                  tensor.sizes(), tensor.strides(), itemsize);
}
inline std::optional<Elements> elements_of(const at::Tensor& tensor) {
  return elements_of(tensor, tensor.storage().data());
}

}  // namespace ascend_attn
