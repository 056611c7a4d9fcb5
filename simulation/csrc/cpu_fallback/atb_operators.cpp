// torch_npu's operators that call ATB. The simulation computes the one that writes to paged caches;
// the others say what they are.
#include <string>

#include "ascendcl/operators.h"
#include "ascendcl/report.h"
#include "cpu_fallback/cpu_fallback.h"

namespace cann_sim {
namespace {

// _npu_reshape_and_cache(key, value, key_cache, value_cache, slot_indices) writes what
// scatter_pa_kv_cache_ does with its default modes.
void reshape_and_cache(const c10::OperatorHandle& op, c10::DispatchKeySet,
                       torch::jit::Stack* stack) {
  static const Operator scatter(operator_named("ascend::scatter_pa_kv_cache_"));
  count(Outcome::cpu, op.operator_name().name);
  torch::jit::Stack arguments;
  for (const auto& argument : scatter.handle.schema().arguments()) {
    const auto& name = argument.name() == "slot_mapping" ? "slot_indices" : argument.name();
    const auto index = op.schema().argumentIndexWithName(name);
    arguments.push_back(index ? torch::jit::peek(*stack, *index, op.schema().arguments().size())
                              : argument.default_value().value());
  }
  run_on_cpu(scatter, arguments);
  torch::jit::drop(*stack, op.schema().arguments().size());
}

void no_operation(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  refuse(c10::toString(op.operator_name()),
         "it calls an operation of ATB, which the simulated CANN lacks; supply " +
             remedy(c10::toString(op.operator_name())));
}

}  // namespace

void replace_atb_operators() {
  static auto* library = new torch::Library(torch::Library::IMPL, "atb",
                                            c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& op : operators_for_npu("atb")) {
    const auto full = c10::toString(op.operator_name());
    library->impl(full.substr(5).c_str(),
                  full == "atb::_npu_reshape_and_cache"
                      ? torch::CppFunction::makeFromBoxedFunction<&reshape_and_cache>()
                      : torch::CppFunction::makeFromBoxedFunction<&no_operation>());
  }
}

}  // namespace cann_sim
