// Operators of torch_npu that the simulation cannot compute: an error says which, and what it
// calls. torch_npu itself would say of some that a library cannot be found, and would run others,
// which CANN compiles, in its task queue: there an error drops all later work.
#include <c10/util/Exception.h>

#include <exception>
#include <memory>
#include <regex>
#include <string>
#include <utility>

#include "ascendcl/report.h"
#include "ascendcl/runtime.h"
#include "cpu_fallback/cpu_fallback.h"

namespace cann_sim {
namespace {

// torch before 2.9 keeps kernels to itself: there they are read from a private member, which the
// arguments of an explicit instantiation may name.
struct Definition {
  friend auto definition_of(Definition, const c10::OperatorHandle& op);
};
template <auto member>
struct DefinitionOf {
  friend auto definition_of(Definition, const c10::OperatorHandle& op) { return op.*member; }
};
template struct DefinitionOf<&c10::OperatorHandle::operatorDef_>;

template <typename Handle>
auto computed_kernel(const Handle& op, c10::DispatchKey key) {
  if constexpr (requires { op.getComputedKernelForDispatchKey(key); }) {
    return op.getComputedKernelForDispatchKey(key);
  } else {
    return definition_of(Definition{}, op)->op.lookup(c10::DispatchKeySet(key));
  }
}

// The operator of torch_npu that runs on this thread and may not call what CANN compiles.
thread_local const std::string* running = nullptr;

class Running {
 public:
  explicit Running(const std::string* name) : before_(std::exchange(running, name)) {}
  ~Running() { running = before_; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  const std::string* before_;
};

void check_compiled_operator() {
  if (running) {
    refuse(*running,
           "it calls an operator that CANN compiles, which the simulated CANN does not; supply " +
               remedy(*running));
  }
}

// Raises if the error of torch_npu says that something is missing in the simulation.
void refuse_what_is_missing(const std::string& name, const std::string& error) {
  static const std::regex function(R"((aclnn\w+) or aclnn\w+GetWorkspaceSize not in)");
  static const std::regex argument(R"(aclnn\w+: the simulation does not compute [^\n]*)");
  std::smatch found;
  if (std::regex_search(error, found, function)) {
    const auto missing = found[1].str();
    refuse(name, "it calls " + missing + ", which the simulated CANN lacks; supply it in a " +
                     "libcust_opapi.so, or " + remedy(name));
  }
  if (std::regex_search(error, found, argument)) {
    refuse(name, found.str());
  }
}

Kernel torch_npu_kernel(const c10::OperatorHandle& handle, std::string name) {
  // compiled_operators.cpp computes these.
  const bool casts_format = name.find("npu_format_cast") != std::string::npos;
  return [name = std::move(name), casts_format,
          kernel = kernel_of(handle, c10::DispatchKey::PrivateUse1)](
             const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const Running scope(casts_format ? nullptr : &name);
    try {
      kernel(op, keys, stack);
    } catch (const std::exception& error) {
      refuse_what_is_missing(name, error.what());
      throw;
    }
  };
}

class Boxed final : public c10::OperatorKernel {
 public:
  explicit Boxed(Kernel kernel) : kernel_(std::move(kernel)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    kernel_(op, keys, stack);
  }

 private:
  Kernel kernel_;
};

}  // namespace

void refuse(const std::string& name, const std::string& why) {
  const auto message = name + ": " + why;
  count(Outcome::refused, message);
  throw c10::NotImplementedError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message);
}

std::string remedy(const std::string& name) {
  return "the operator with torch.library.impl(\"" + name + "\", \"PrivateUse1\")";
}

Kernel kernel_of(const c10::OperatorHandle& op, c10::DispatchKey key) {
  return [kernel = computed_kernel(op, key)](const c10::OperatorHandle& called,
                                             c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    kernel.callBoxed(called, keys, stack);
  };
}

torch::CppFunction boxed(Kernel kernel) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Boxed>(std::move(kernel)));
}

std::vector<c10::OperatorHandle> operators_for_npu(std::string_view library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  std::vector<c10::OperatorHandle> found;
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (op && name.getNamespace() == library &&
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      found.push_back(*op);
    }
  }
  return found;
}

void name_what_is_missing() {
  static auto* library = new torch::Library(torch::Library::IMPL, "npu",
                                            c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& op : operators_for_npu("npu")) {
    const auto full = c10::toString(op.operator_name());
    library->impl(full.substr(5).c_str(), boxed(torch_npu_kernel(op, full)));
  }
  set_compiled_operator_check(&check_compiled_operator);
}

}  // namespace cann_sim
