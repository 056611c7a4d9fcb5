// NPU tensors as CPU tensors, and back.
#include <ATen/EmptyTensor.h>
#include <ATen/NestedTensorImpl.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

#include "ascendcl/runtime.h"
#include "cpu_fallback/cpu_fallback.h"

namespace cann_sim {
namespace {

size_t bytes_of(const at::Tensor& tensor) {
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
}

bool same_layout(const at::Tensor& one, const at::Tensor& other) {
  return one.sizes() == other.sizes() && one.strides() == other.strides();
}

// Saves a tensor that is about to get the elements of one on the CPU.
void save(const at::Tensor& npu, size_t bytes) {
  if (is_recording_anywhere()) {
    save_until_recorded(after_queued_work(npu.device()), npu.mutable_data_ptr(), bytes);
  }
}

// A nested tensor with the layout of one, in other memory.
at::Tensor nested_in(const at::Tensor& memory, const at::Tensor& nested) {
  const auto* layout = at::native::get_nested_tensor_impl(nested);
  return at::detail::make_tensor<at::native::NestedTensorImpl>(memory, layout->get_nested_sizes(),
                                                               layout->get_nested_strides(),
                                                               layout->get_storage_offsets());
}

}  // namespace

at::Tensor memory_of_nested(const at::Tensor& nested) {
  return at::native::get_nested_tensor_impl(nested)->get_unsafe_storage_as_tensor();
}

at::Tensor Aliases::of(const at::Tensor& npu) {
  if (npu.is_nested()) {
    return nested_in(of(memory_of_nested(npu)), npu);
  }
  if (!device) {
    device = npu.device();
  }
  TORCH_CHECK(npu.device() == *device,
              "Expected all tensors to be on the same device, but found at least two devices, ",
              *device, " and ", npu.device(), "!");
  auto* implementation = npu.unsafeGetTensorImpl();
  const auto* storage = npu.storage().unsafeGetStorageImpl();
  const auto* known = find(npu);
  if (known && known->npu.is_same(npu)) {
    return known->cpu;
  }
  c10::Storage memory = known ? known->memory : c10::Storage();
  void* address = const_cast<void*>(storage->data());
  if (!memory) {
    // An operator may give an output another size: it is then allocated here, as for the CPU.
    memory = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), storage->nbytes(),
        c10::DataPtr(address, c10::Device(c10::kCPU)), c10::GetCPUAllocator(), /*resizable=*/true);
  }
  auto cpu = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(memory), c10::DispatchKeySet(c10::DispatchKey::CPU), npu.dtype());
  auto* alias = cpu.unsafeGetTensorImpl();
  alias->set_sizes_and_strides(npu.sizes(), npu.strides(), npu.storage_offset());
  if (implementation->is_wrapped_number()) {
    alias->set_wrapped_number(true);
  }
  if (npu.is_conj()) {
    alias->_set_conj(true);
  }
  if (npu.is_neg()) {
    alias->_set_neg(true);
  }
  add({npu, cpu, std::move(memory), address});
  return cpu;
}

const Aliases::Pair* Aliases::find(const at::Tensor& tensor) const {
  const auto* same = tensor.unsafeGetTensorImpl();
  const auto* storage = tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
  if (!places_.empty()) {
    for (const void* key : {static_cast<const void*>(same), static_cast<const void*>(storage)}) {
      if (const auto place = places_.find(key); place != places_.end()) {
        return &pairs_[place->second];
      }
    }
    return nullptr;
  }
  const Pair* found = nullptr;
  for (const auto& pair : pairs_) {
    if (pair.npu.unsafeGetTensorImpl() == same || pair.cpu.unsafeGetTensorImpl() == same) {
      return &pair;
    }
    if (pair.npu.storage().unsafeGetStorageImpl() == storage ||
        pair.memory.unsafeGetStorageImpl() == storage) {
      found = &pair;
    }
  }
  return found;
}

void Aliases::add(Pair pair) {
  pairs_.push_back(std::move(pair));
  if (pairs_.size() < kMany) {
    return;
  }
  for (size_t i = places_.empty() ? 0 : pairs_.size() - 1; i < pairs_.size(); ++i) {
    const auto& [npu, cpu, memory, address] = pairs_[i];
    places_.emplace(npu.unsafeGetTensorImpl(), i);
    places_.emplace(cpu.unsafeGetTensorImpl(), i);
    places_.emplace(npu.storage().unsafeGetStorageImpl(), i);
    places_.emplace(memory.unsafeGetStorageImpl(), i);
  }
}

at::Tensor Aliases::back(const at::Tensor& cpu) const {
  if (!cpu.defined() || !cpu.is_cpu() || !device) {
    return cpu;
  }
  if (cpu.is_nested()) {
    return nested_in(back(memory_of_nested(cpu)), cpu);
  }
  if (const auto* pair = find(cpu)) {
    if (pair->cpu.is_same(cpu)) {
      return pair->npu;
    }
    if (pair->memory.data() == pair->address && cpu.dtype() == pair->npu.dtype()) {
      return at::as_strided(pair->npu, cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }
  return on_npu(cpu, *device);
}

void Aliases::resize_arguments() const {
  for (const auto& [npu, cpu, memory, address] : pairs_) {
    const bool moved = memory.data() != address;
    if (moved) {
      npu.resize_(cpu.sizes());
      // It copies what the tensor held, by the task queue.
      after_queued_work(*device);
    }
    if (!same_layout(npu, cpu)) {
      npu.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(),
                                                       cpu.storage_offset());
    }
    if (moved && cpu.numel() > 0) {
      save(npu, bytes_of(cpu));
      std::memcpy(npu.mutable_data_ptr(), cpu.const_data_ptr(), bytes_of(cpu));
    }
  }
}

at::Tensor on_npu(const at::Tensor& cpu, c10::Device device) {
  if (cpu.is_conj() || cpu.is_neg()) {
    return on_npu(cpu.resolve_conj().resolve_neg(), device);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(cpu.layout() == at::kStrided, "the simulated NPU has no tensors of ",
                              "layout ", cpu.layout());
  auto npu = at::empty_strided(cpu.sizes(), cpu.strides(), cpu.options().device(device));
  if (npu.numel() > 0) {
    save(npu, bytes_of(cpu));
    std::memcpy(npu.mutable_data_ptr(), cpu.const_data_ptr(), bytes_of(cpu));
  }
  return npu;
}

}  // namespace cann_sim
