#include "dispatch/outputs.h"

#include "core/error.h"
#include "dispatch/operator.h"

namespace ascend_attn {
namespace {

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  return impl->has_storage() ? impl->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

// Fake tensors, and those that torch.compile traces, have no memory: they overlap where they share
// a storage, as the tensors will that they stand for.
const void* address_of(const at::Tensor& tensor, const c10::StorageImpl& storage) {
  return tensor.is_meta() ? nullptr : storage.data();
}

bool is_symbolic(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

// Where a tensor's elements are. Without memory, the storage object stands for what it would hold.
std::optional<Elements> location_of(const at::Tensor& tensor) {
  const auto* storage = storage_of(tensor);
  if (storage == nullptr || is_symbolic(tensor)) {
    return std::nullopt;
  }
  const auto* address = address_of(tensor, *storage);
  return elements_of(tensor, address ? address : storage);
}

// Whether equal addresses of the two are the same byte.
bool in_one_memory(const at::Tensor& a, const at::Tensor& b) {
  const auto* storage = storage_of(a);
  return a.device() == b.device() && (storage == storage_of(b) || address_of(a, *storage));
}

}  // namespace

const at::Tensor& OutputSource::take(c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  const auto index = next_++;
  const auto& tensor = *given_[index];
  const auto name = [&]() -> const std::string& { return output_name(op_, index); };
  if (const auto dtype = c10::typeMetaToScalarType(options.dtype()); tensor.scalar_type() != dtype)
      [[unlikely]] {
    raise_dtype(op_, {name(), tensor}, dtype);
  }
  if (tensor.device() != options.device()) [[unlikely]] {
    raise(Violation::value, op_, name(),
          c10::str("expected device ", options.device(), ", got ", tensor.device()));
  }
  if (!fits_shape(tensor, sizes)) [[unlikely]] {
    raise(Violation::value, op_, name(),
          c10::str("expected shape ", sizes, ", got ", tensor.sym_sizes()));
  }
  if (!tensor.is_contiguous()) [[unlikely]] {
    raise(Violation::value, op_, name(),
          c10::str("expected a contiguous tensor, got strides ", tensor.sym_strides()));
  }
  return tensor;
}

WrittenMemory::WrittenMemory(const char* op, const at::Tensor* const* outputs, size_t count)
    : op_(op) {
  for (size_t index = 0; index < count; ++index) {
    const auto& tensor = *outputs[index];
    if (const auto* other = find_overlap(tensor)) [[unlikely]] {
      raise(Violation::value, op, output_name(op, index),
            c10::str("expected memory of its own, got some of ", output_name(op, other->index),
                     "'s"));
    }
    const auto elements = location_of(tensor);
    if (elements || is_symbolic(tensor)) {
      outputs_.push_back({tensor, elements ? elements->span() : Span(), index});
    }
  }
}

auto WrittenMemory::find_overlap(const at::Tensor& tensor) const -> const Output* {
  const auto elements = location_of(tensor);
  for (const auto& output : outputs_) {
    // This is all that can be told with symbolic sizes.
    if (tensor.is_same(output.tensor)) [[unlikely]] {
      return &output;
    }
    const auto bytes = output.bytes;
    if (elements && elements->span().meets(bytes) && in_one_memory(output.tensor, tensor) &&
        elements->any_in({bytes, 1, bytes.end - bytes.begin})) [[unlikely]] {
      return &output;
    }
  }
  return nullptr;
}

void WrittenMemory::check_apart(Place place, const at::Tensor& read) const {
  if (const auto* output = find_overlap(read)) [[unlikely]] {
    raise(Violation::value, op_, output_name(op_, output->index),
          c10::str("expected memory of its own, got some of ", place_name(op_, place), "'s"));
  }
}

}  // namespace ascend_attn
