#include "ops/operator.h"

namespace ascend_attn {

const std::string& argument_name(const char* op, size_t position) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow((std::string("ascend::") + op).c_str(), "")
      .schema()
      .arguments()[position]
      .name();
}

}  // namespace ascend_attn
