// Registers kernels without torch/library.h, which takes longer to parse than most kernels to
// compile.
#pragma once

#include <c10/core/DispatchKey.h>

#include <memory>
#include <source_location>

namespace torch {
class Library;
}

namespace ascend_attn {

// Registers kernels for one dispatch key while it lives, as TORCH_LIBRARY_IMPL does.
class Registration {
 public:
  Registration(c10::DispatchKey key, void (*register_kernels)(torch::Library&),
               std::source_location place = std::source_location::current());
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

 private:
  std::unique_ptr<torch::Library> library_;
};

}  // namespace ascend_attn
