#include "npu/aclnn/library.h"

#include <op_plugin/utils/op_api_common_base.h>

namespace ascend_attn::aclnn {

void* find_address(const std::string& name) { return GetOpApiFuncAddr(name.c_str()); }

bool has_function(const std::string& name) {
  return find_address(name + "GetWorkspaceSize") && find_address(name);
}

}  // namespace ascend_attn::aclnn
