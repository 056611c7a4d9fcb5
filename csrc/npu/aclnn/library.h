// Functions of CANN, found by name in the libraries of this process.
#pragma once

#include <op_plugin/utils/op_api_common_base.h>

#include <string>

namespace ascend_attn::aclnn {

// Null when this CANN lacks it. A customer's libcust_opapi.so comes before libopapi.so.
template <typename Signature>
Signature* find_function(const char* name) {
  return reinterpret_cast<Signature*>(GetOpApiFuncAddr(name));
}

// Whether this CANN has an aclnn function, in both phases.
inline bool has_function(const std::string& name) {
  return GetOpApiFuncAddr((name + "GetWorkspaceSize").c_str()) && GetOpApiFuncAddr(name.c_str());
}

}  // namespace ascend_attn::aclnn
