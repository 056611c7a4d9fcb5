#include "core/error.h"

#include <algorithm>

namespace ascend_attn {

std::string status_text(int code) {
  switch (static_cast<Status>(code)) {
    case Status::none:
      break;
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

namespace {

// Whether Python can decode it. The bytes of a string may be any.
bool is_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const auto byte = [&](size_t i) {
      return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0u;
    };
    const unsigned first = byte(0);
    const size_t rest = first < 0x80 ? 0 : first < 0xE0 ? 1 : first < 0xF0 ? 2 : 3;
    // Bytes that begin no character; then longer forms than needed, surrogates and what is too
    // large.
    if ((first >= 0x80 && first < 0xC2) || first > 0xF4 || (first == 0xE0 && byte(1) < 0xA0) ||
        (first == 0xED && byte(1) > 0x9F) || (first == 0xF0 && byte(1) < 0x90) ||
        (first == 0xF4 && byte(1) > 0x8F)) {
      return false;
    }
    for (size_t i = 1; i <= rest; ++i) {
      if ((byte(i) & 0xC0) != 0x80) {
        return false;
      }
    }
    at += rest + 1;
  }
  return true;
}

}  // namespace

std::string quoted(std::string_view text) {
  constexpr size_t kLongest = 100;
  constexpr std::string_view kDigits = "0123456789abcdef";
  size_t length = std::min(text.size(), kLongest);
  const bool readable = is_utf8(text);
  while (readable && length < text.size() &&
         (static_cast<unsigned char>(text[length]) & 0xC0) == 0x80) {
    --length;  // in the middle of a character of UTF-8
  }
  std::string shown = "'";
  for (const char character : text.substr(0, length)) {
    if (const auto code = static_cast<unsigned char>(character);
        code < ' ' || code == 0x7F || (code > 0x7F && !readable)) {
      shown += {'\\', 'x', kDigits[code / 16], kDigits[code % 16]};
    } else {
      shown += character;
    }
  }
  return shown + (length < text.size() ? "'..." : "'");
}

void raise(Violation violation, std::string_view op, std::string_view argument,
           const std::string& message, Status status) {
  auto text = c10::str("ascend::", op, ": ", argument, ": ", message);
  if (status != Status::none) {
    text += c10::str(" [", status_text(static_cast<int>(status)), "]");
  }
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
