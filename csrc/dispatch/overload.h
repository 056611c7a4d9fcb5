// The definitions of Overload, which csrc/library.cpp instantiates for all operators. Other files
// call them: [[gnu::used]] keeps those that no call is left of in that file.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string>
#include <type_traits>
#include <utility>

#include "dispatch/operator.h"

namespace ascend_attn {

template <typename Op, typename Signature>
inline constexpr const char* kOverloadName = std::is_same_v<Signature, SignatureOf<Op>> ? "" : kOut;

template <typename Op, typename Outputs, typename... Parameters>
[[gnu::used]] Outputs Overload<Op, Outputs(Parameters...)>::call(Parameters... parameters) {
  using Signature = Outputs(Parameters...);
  static const auto handle =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow(c10::str("ascend::", Op::name).c_str(), kOverloadName<Op, Signature>)
          .template typed<Signature>();
  return handle.call(std::forward<Parameters>(parameters)...);
}

template <typename Op, typename Outputs, typename... Parameters>
[[gnu::used]] void Overload<Op, Outputs(Parameters...)>::register_kernel(
    torch::Library& library, Outputs (*kernel)(Parameters...)) {
  const std::string overload = kOverloadName<Op, Outputs(Parameters...)>;
  library.impl((overload.empty() ? Op::name : c10::str(Op::name, ".", overload)).c_str(), kernel);
}

}  // namespace ascend_attn
