#include "npu/aclnn/library.h"

#include <dlfcn.h>
#include <op_plugin/utils/op_api_common_base.h>

#include <array>

namespace ascend_attn::aclnn {

FunctionAddress find_function(const std::string& name) { return {GetOpApiFuncAddr(name.c_str())}; }

FunctionAddress find_function_of_cann(const std::string& name) {
  // A CANN whose operators are packages of their own has one library for each of them.
  static const std::array libraries{dlopen("libopapi.so", RTLD_LAZY),
                                    dlopen("libopapi_transformer.so", RTLD_LAZY)};
  for (void* const library : libraries) {
    if (void* const address = library ? dlsym(library, name.c_str()) : nullptr) {
      return {address};
    }
  }
  return {nullptr};
}

FunctionAddress find_runtime_function(const char* name) { return {dlsym(RTLD_DEFAULT, name)}; }

bool has_function(const std::string& name) {
  return find_function(name + "GetWorkspaceSize").address && find_function(name).address;
}

}  // namespace ascend_attn::aclnn
