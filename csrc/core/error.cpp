#include "core/error.h"

namespace ascend_attn {

std::string status_text(int code) {
  switch (static_cast<Status>(code)) {
    case Status::null_pointer:
      return c10::str("ACLNN_ERR_PARAM_NULLPTR ", code);
    case Status::invalid:
      return c10::str("ACLNN_ERR_PARAM_INVALID ", code);
    case Status::runtime:
      return c10::str("ACLNN_ERR_RUNTIME_ERROR ", code);
    case Status::shape_inference:
      return c10::str("ACLNN_ERR_INNER_TILING_ERROR ", code);
  }
  return c10::str(code);
}

void raise(Violation violation, std::string_view op, std::string_view argument,
           const std::string& message, Status status) {
  const auto text = c10::str("ascend::", op, ": ", argument, ": ", message, " [",
                             status_text(static_cast<int>(status)), "]");
  const c10::SourceLocation here{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  switch (violation) {
    case Violation::type:
      throw c10::TypeError(here, text);
    case Violation::value:
      throw c10::ValueError(here, text);
    case Violation::not_implemented:
      throw c10::NotImplementedError(here, text);
    case Violation::runtime:
      break;
  }
  throw c10::Error(here, text);
}

}  // namespace ascend_attn
