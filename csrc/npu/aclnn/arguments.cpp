#include "npu/aclnn/arguments.h"

#include <c10/util/Exception.h>
#include <op_plugin/utils/op_api_common_base.h>
#include <torch_npu/csrc/core/NPUStorageImpl.h>

#include <algorithm>

#include "npu/aclnn/library.h"

namespace ascend_attn::aclnn {
namespace {

// A null handle would be an argument that is absent.
template <typename Handle>
Handle made(Handle handle, const char* maker) {
  if (!handle) [[unlikely]] {
    throw NoHandle{maker};
  }
  return handle;
}

// The makers of handles, found once.
struct Makers {
  _aclCreateTensor create_tensor = find_function("aclCreateTensor");
  _aclDestroyTensor destroy_tensor = find_function("aclDestroyTensor");
  _aclCreateTensorList create_tensor_list = find_function("aclCreateTensorList");
  _aclDestroyTensorList destroy_tensor_list = find_function("aclDestroyTensorList");
  _aclCreateIntArray create_int_array = find_function("aclCreateIntArray");
  _aclDestroyIntArray destroy_int_array = find_function("aclDestroyIntArray");
};

const Makers& makers() {
  static const Makers instance;
  return instance;
}

}  // namespace

void Destroy::operator()(AclTensor tensor) const { makers().destroy_tensor(tensor); }
void Destroy::operator()(AclTensorList list) const { makers().destroy_tensor_list(list); }
void Destroy::operator()(AclIntArray array) const { makers().destroy_int_array(array); }

TensorArgument::TensorArgument(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return;
  }
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  TORCH_CHECK_VALUE(sizes.size() <= kMaxDimensions, "ascend: expected at most ", kMaxDimensions,
                    " dimensions, got ", sizes.size());
  device_ = tensor.device();
  dtype_ = ConvertType(tensor.scalar_type());
  offset_ = tensor.storage_offset();
  dimensions_ = sizes.size();
  std::ranges::copy(sizes, sizes_.begin());
  std::ranges::copy(strides, strides_.begin());
  const auto& storage = tensor.storage();
  if (device_->is_privateuseone()) {
    format_ = static_cast<const torch_npu::NPUStorageImpl*>(storage.unsafeGetStorageImpl())
                  ->npu_desc_.npu_format_;
  }
  storage_ = const_cast<void*>(storage.data());
  storage_elements_ = static_cast<int64_t>(storage.nbytes() / tensor.element_size());
}

TensorHandle TensorArgument::create() const {
  if (!device_) {
    return nullptr;
  }
  auto* handle = makers().create_tensor(sizes_.data(), dimensions_,
                                        static_cast<aclDataType>(dtype_), strides_.data(), offset_,
                                        ACL_FORMAT_ND, &storage_elements_, 1, storage_);
  return TensorHandle(made(handle, "aclCreateTensor"));
}

void TensorArgument::add_to(ExecutorKey& key) const {
  key.add(device_.has_value());
  if (!device_) {
    return;
  }
  key.add(device_->index());
  key.add(dtype_);
  key.add(storage_elements_);
  key.add(offset_);
  key.add(dimensions_);
  key.add(sizes_.data(), dimensions_ * sizeof(int64_t));
  key.add(strides_.data(), dimensions_ * sizeof(int64_t));
  key.add_address(storage_);
}

TensorListHandle TensorListArgument::create() const {
  std::vector<TensorHandle> handles;
  std::vector<AclTensor> pointers;
  for (const auto& tensor : tensors_) {
    handles.push_back(tensor.create());
    pointers.push_back(handles.back().get());
  }
  TensorListHandle list(
      made(makers().create_tensor_list(pointers.data(), pointers.size()), "aclCreateTensorList"));
  // They are the list's now.
  for (auto& handle : handles) {
    handle.release();
  }
  return list;
}

void TensorListArgument::add_to(ExecutorKey& key) const {
  key.add(tensors_.size());
  for (const auto& tensor : tensors_) {
    tensor.add_to(key);
  }
}

IntegerList integers_of(const at::OptionalSymIntArrayRef& values) {
  IntegerList integers;
  for (size_t i = 0; values && i < values->size(); ++i) {
    integers.push_back((*values)[i].expect_int());
  }
  return integers;
}

IntArrayHandle IntArrayArgument::create() const {
  if (absent_) {
    return nullptr;
  }
  return IntArrayHandle(
      made(makers().create_int_array(values_.data(), values_.size()), "aclCreateIntArray"));
}

void IntArrayArgument::add_to(ExecutorKey& key) const {
  key.add(absent_);
  key.add(values_.size());
  key.add(values_.data(), values_.size() * sizeof(int64_t));
}

}  // namespace ascend_attn::aclnn
