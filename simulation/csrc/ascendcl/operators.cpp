#include "ascendcl/operators.h"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>

namespace cann_sim {
namespace {

// CANN_SIM_OPERATORS is the module that registers the operators. If Python has loaded another build
// of it by now, the operators of that one are there, and registering them again would fail.
void load_operators() {
  static std::once_flag once;
  std::call_once(once, [] {
    const char* module = std::getenv("CANN_SIM_OPERATORS");
    const auto is_loaded =
        c10::Dispatcher::singleton().findSchema({"ascend_attn_ops::_set_thread_limits", ""});
    if (module && *module && !is_loaded) {
      TORCH_CHECK(dlopen(module, RTLD_NOW), "ascend_attn_ops cannot be loaded: ", dlerror());
    }
  });
}

}  // namespace

std::optional<c10::OperatorHandle> find_operator(const std::string& name,
                                                 const std::string& overload) {
  load_operators();
  return c10::Dispatcher::singleton().findSchema({name, overload});
}

c10::OperatorHandle operator_named(const std::string& name, const std::string& overload) {
  const auto op = find_operator(name, overload);
  TORCH_CHECK(op, "needs the operator ", name,
              " of ascend_attn_ops, which is not installed: pip install --no-build-isolation .");
  return *op;
}

}  // namespace cann_sim
