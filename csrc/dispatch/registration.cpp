#include "dispatch/registration.h"

#include <torch/library.h>

namespace ascend_attn {

Registration::Registration(c10::DispatchKey key, void (*register_kernels)(torch::Library&),
                           std::source_location place)
    : library_(std::make_unique<torch::Library>(torch::Library::IMPL, "ascend", key,
                                                place.file_name(), place.line())) {
  register_kernels(*library_);
}

Registration::~Registration() = default;

}  // namespace ascend_attn
