// Every check raises a message of the same form:
//   ascend::<operator>: <argument>: expected <rule>, got <value> [<aclnn name> <aclnn code>]
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <string>
#include <string_view>

namespace ascend_attn {

// The aclnn status codes that the documentation of the operators names.
enum class Status : int {
  none = 0,                 // of what is no function of CANN
  null_pointer = 161001,    // ACLNN_ERR_PARAM_NULLPTR
  invalid = 161002,         // ACLNN_ERR_PARAM_INVALID
  runtime = 361001,         // ACLNN_ERR_RUNTIME_ERROR
  shape_inference = 561002  // ACLNN_ERR_INNER_TILING_ERROR
};

// Returns "ACLNN_ERR_PARAM_INVALID 161002", or only the number of an unknown code.
std::string status_text(int code);

// Returns the Python name of a dtype, such as "bfloat16". A copy: up to torch 2.12 the names are
// temporary strings.
inline std::string dtype_name(c10::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

// Returns a string of the caller for a message: in quotes, on one line, and shortened if it is
// long.
std::string quoted(std::string_view text);

// The kind of Python exception that a violated rule raises.
enum class Violation { type, value, not_implemented, runtime };

[[noreturn]] void raise(Violation violation, std::string_view op, std::string_view argument,
                        const std::string& message, Status status = Status::invalid);

// These checks format their message only if the rule is violated.
template <typename... Parts>
inline void check_value(bool holds, std::string_view op, std::string_view argument,
                        const Parts&... parts) {
  if (!holds) [[unlikely]] {
    raise(Violation::value, op, argument, c10::str(parts...));
  }
}

template <typename... Parts>
inline void check_type(bool holds, std::string_view op, std::string_view argument,
                       const Parts&... parts) {
  if (!holds) [[unlikely]] {
    raise(Violation::type, op, argument, c10::str(parts...));
  }
}

// Raises for a missing tensor or list, with aclnn's null-pointer status.
template <typename... Parts>
inline void check_present(bool present, std::string_view op, std::string_view argument,
                          const Parts&... parts) {
  if (!present) [[unlikely]] {
    raise(Violation::value, op, argument, c10::str(parts...), Status::null_pointer);
  }
}

template <typename... Parts>
inline void check_implemented(bool holds, std::string_view op, std::string_view argument,
                              const Parts&... parts) {
  if (!holds) [[unlikely]] {
    raise(Violation::not_implemented, op, argument, c10::str(parts...));
  }
}

}  // namespace ascend_attn
