// Arguments of an aclnn call: what a caller passes for each C type, and the handle made of it.
//
// A call may run later, on the thread of torch_npu's task queue, so that every argument owns what
// it needs. It does not own the memory of tensors: that is freed and reused in stream order.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/OptionalArrayRef.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <concepts>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/lengths.h"
#include "npu/aclnn/executor_cache.h"

struct aclTensor;
struct aclTensorList;
struct aclIntArray;

namespace ascend_attn::aclnn {

// The handles in prototypes. A text is a `char*`.
using AclTensor = const aclTensor*;
using AclTensorList = const aclTensorList*;
using AclIntArray = const aclIntArray*;

struct Destroy {
  void operator()(AclTensor tensor) const;
  // And the tensors in it.
  void operator()(AclTensorList list) const;
  void operator()(AclIntArray array) const;
};
using TensorHandle = std::unique_ptr<const aclTensor, Destroy>;
using TensorListHandle = std::unique_ptr<const aclTensorList, Destroy>;
using IntArrayHandle = std::unique_ptr<const aclIntArray, Destroy>;

// Thrown when CANN returns no handle; the launcher adds which call.
struct NoHandle {
  const char* maker;
};

// A tensor, or none.
class TensorArgument {
 public:
  TensorArgument(const at::Tensor& tensor);
  TensorArgument(const std::optional<at::Tensor>& tensor) {
    if (tensor) {
      *this = TensorArgument(*tensor);
    }
  }
  TensorArgument(std::nullopt_t) {}

  TensorHandle create() const;
  void add_to(ExecutorKey& key) const;
  // Itself, or nothing.
  std::span<const TensorArgument> tensors() const { return {this, device_ ? size_t{1} : 0}; }
  // The device of a tensor that is present.
  const c10::Device& device() const { return *device_; }
  // In which order the memory has the elements, an aclFormat.
  int format() const { return format_; }

 private:
  // No aclnn function of attention takes more.
  static constexpr size_t kMaxDimensions = 6;

  std::optional<c10::Device> device_;  // absent: no tensor
  void* storage_ = nullptr;
  int dtype_ = 0;
  int format_ = 0;
  int64_t storage_elements_ = 0;
  int64_t offset_ = 0;
  uint64_t dimensions_ = 0;
  std::array<int64_t, kMaxDimensions> sizes_;
  std::array<int64_t, kMaxDimensions> strides_;
};

class TensorListArgument {
 public:
  TensorListArgument(at::TensorList list) : tensors_(list.begin(), list.end()) {}

  TensorListHandle create() const;
  void add_to(ExecutorKey& key) const;
  std::span<const TensorArgument> tensors() const { return tensors_; }

 private:
  std::vector<TensorArgument> tensors_;
};

using IntegerList = c10::SmallVector<int64_t, 8>;
// A missing list is passed as an empty one, as torch_npu does.
IntegerList integers_of(const at::OptionalSymIntArrayRef& values);
inline IntegerList integers_of(c10::ArrayRef<int64_t> values) {
  return IntegerList(values.begin(), values.end());
}

// A list of integers on the host, or none, which is a null pointer.
class IntArrayArgument {
 public:
  IntArrayArgument(IntegerList values) : values_(std::move(values)) {}
  IntArrayArgument(std::optional<IntegerList> values)
      : absent_(!values), values_(std::move(values).value_or(IntegerList())) {}
  IntArrayArgument(at::IntArrayRef values) : values_(values) {}
  template <std::convertible_to<at::OptionalSymIntArrayRef> Values>
  IntArrayArgument(const Values& values)
      : values_(integers_of(at::OptionalSymIntArrayRef(values))) {}
  IntArrayArgument(const Lengths& lengths) : values_(integers_of(lengths.values())) {}

  IntArrayHandle create() const;
  void add_to(ExecutorKey& key) const;

 private:
  bool absent_ = false;
  IntegerList values_;
};

class TextArgument {
 public:
  TextArgument(std::string_view text) : text_(text) {}

  // aclnn declares its texts as char* and does not write to them.
  char* create() const { return const_cast<char*>(text_.c_str()); }
  void add_to(ExecutorKey& key) const { key.add(std::string_view(text_)); }

 private:
  std::string text_;
};

// A number of exactly that type: C's conversions would hide an argument in the wrong place.
template <typename T>
class NumberArgument {
 public:
  template <std::same_as<T> U>
  NumberArgument(U value) : value_(value) {}

  T create() const { return value_; }
  void add_to(ExecutorKey& key) const { key.add(value_); }

 private:
  T value_;
};

TensorArgument argument_for(AclTensor);
TensorListArgument argument_for(AclTensorList);
IntArrayArgument argument_for(AclIntArray);
TextArgument argument_for(char*);
template <typename T>
  requires std::is_arithmetic_v<T>
NumberArgument<T> argument_for(T);
// The type that a caller passes where the prototype has `Parameter`.
template <typename Parameter>
using ArgumentFor = decltype(argument_for(std::declval<Parameter>()));

}  // namespace ascend_attn::aclnn
