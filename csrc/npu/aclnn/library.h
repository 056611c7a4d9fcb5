// Functions of CANN, found by name in the libraries of this process.
#pragma once

#include <string>

namespace ascend_attn::aclnn {

// Returns null when this CANN lacks it. A customer's libcust_opapi.so comes before libopapi.so.
void* find_address(const std::string& name);

template <typename Signature>
Signature* find_function(const char* name) {
  return reinterpret_cast<Signature*>(find_address(name));
}

// Whether this CANN has an aclnn function, in both phases.
bool has_function(const std::string& name);

}  // namespace ascend_attn::aclnn
