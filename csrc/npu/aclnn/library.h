// Functions of CANN, found by name in the libraries of this process.
#pragma once

#include <string>

namespace ascend_attn::aclnn {

// The address of a function, as the pointer that it initialises; null when this CANN lacks it.
struct FunctionAddress {
  void* address;

  template <typename Signature>
  operator Signature*() const {
    return reinterpret_cast<Signature*>(address);
  }
};

// Finds an aclnn function. A customer's libcust_opapi.so comes before libopapi.so.
FunctionAddress find_function(const std::string& name);
// The same in CANN's own libraries alone.
FunctionAddress find_function_of_cann(const std::string& name);
// Finds a function of the libraries that torch_npu is linked to.
FunctionAddress find_runtime_function(const char* name);

// Whether this CANN has an aclnn function, in both phases.
bool has_function(const std::string& name);

}  // namespace ascend_attn::aclnn
