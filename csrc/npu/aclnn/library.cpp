#include "npu/aclnn/library.h"

#include <dlfcn.h>
#include <op_plugin/utils/op_api_common_base.h>

namespace ascend_attn::aclnn {

FunctionAddress find_function(const std::string& name) { return {GetOpApiFuncAddr(name.c_str())}; }

FunctionAddress find_runtime_function(const char* name) { return {dlsym(RTLD_DEFAULT, name)}; }

bool has_function(const std::string& name) {
  return find_function(name + "GetWorkspaceSize").address && find_function(name).address;
}

}  // namespace ascend_attn::aclnn
