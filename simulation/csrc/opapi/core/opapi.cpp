// The two phases of every aclnn function.
#include "opapi/core/opapi.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/tensor.h>

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "ascendcl/operators.h"
#include "ascendcl/report.h"
#include "ascendcl/runtime.h"
#include "ascendcl/stream_order.h"
#include "opapi/core/control.h"

namespace cann_sim {
namespace {

constexpr uint64_t kMoreThanThereIs = uint64_t{1} << 40;

int failure(int status, std::string message) {
  set_error_message(std::move(message));
  return status;
}

// Runs it; the failure of an exception that has no status has this one.
template <typename Task>
int without_exceptions(const Function& function, int status, const Task& task) {
  std::string text;
  try {
    task();
    return ACL_SUCCESS;
  } catch (const Refusal& refusal) {
    status = refusal.status;
    text = refusal.what();
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = error.what();
  }
  const auto message = c10::str(function.name, ": ", text);
  if (status != kRuntime) {
    count(Outcome::refused, message);
  }
  return failure(status, message);
}

bool is_required(Kind kind) {
  return kind == Kind::input || kind == Kind::input_or_none || kind == Kind::output;
}

bool is_output(Kind kind) { return kind == Kind::output || kind == Kind::optional_output; }

bool is_given(const Value& value) {
  const auto* list = std::get_if<std::vector<int64_t>>(&value);
  return list ? !list->empty() : !std::holds_alternative<std::nullptr_t>(value);
}

// Raises for a value that CANN refuses.
void check_value(const Function& function, const std::vector<Value>& values, size_t i) {
  const auto& argument = function.arguments.at(i);
  const bool is_null = std::holds_alternative<std::nullptr_t>(values[i]);
  if (is_null && is_required(argument.kind)) {
    throw Refusal(argument.status_of_null, c10::str(argument.name, " is nullptr"));
  }
  if (argument.kind == Kind::not_computed && is_given(values[i])) {
    throw Refusal(kInvalid, c10::str("the simulation does not compute ", argument.name));
  }
  const int status = is_output(argument.kind) ? function.status_of_copy : kInvalid;
  for (const auto& view : views_of(values[i])) {
    if (!argument.dtypes.allow(view.dtype)) {
      throw Refusal(status, c10::str(argument.name, ": dtype ", c10::str(scalar_type(view.dtype)),
                                     " is not supported"));
    }
  }
  const auto* view = std::get_if<TensorView>(&values[i]);
  if (!view || argument.model.empty()) {
    return;
  }
  const auto place = std::ranges::find(function.arguments, argument.model, &Argument::name);
  const auto models = views_of(values[place - function.arguments.begin()]);
  if (!models.empty() && (view->dtype != models.front().dtype ||
                          (argument.has_sizes_of_model && view->sizes != models.front().sizes))) {
    throw Refusal(
        function.status_of_copy,
        c10::str(argument.name, " has another dtype or other sizes than ", argument.model));
  }
}

c10::IValue to_ivalue(const Value& value) {
  return std::visit(
      [&](const auto& held) -> c10::IValue {
        using Held = std::decay_t<decltype(held)>;
        if constexpr (std::is_same_v<Held, std::nullptr_t>) {
          return {};
        } else if constexpr (std::is_same_v<Held, TensorView>) {
          return held.tensor();
        } else if constexpr (std::is_same_v<Held, std::vector<TensorView>>) {
          c10::List<at::Tensor> tensors;
          for (const auto& view : held) {
            tensors.push_back(view.tensor());
          }
          return tensors;
        } else if constexpr (std::is_same_v<Held, Scalar>) {
          return at::isIntegralType(scalar_type(held.dtype), /*includeBool=*/true)
                     ? c10::IValue(static_cast<int64_t>(held.value))
                     : c10::IValue(held.value);
        } else {
          return held;
        }
      },
      value);
}

bool is_absent(const Function& function, const std::vector<Value>& values, size_t i) {
  if (const auto* view = std::get_if<TensorView>(&values[i])) {
    return function.arguments[i].kind == Kind::input_or_none && view->sizes.empty();
  }
  const auto* list = std::get_if<std::vector<int64_t>>(&values[i]);
  return function.arguments[i].kind == Kind::lengths && list && list->empty() &&
         std::ranges::none_of(values, [](const Value& value) {
           const auto* text = std::get_if<std::string>(&value);
           return text && *text == "TND";
         });
}

// Switches off the limits that ascend_attn_ops checks on this thread: its NPU kernel has checked
// those of the product, on a thread whose limits may be lifted. Does nothing without the library.
class WithoutLimits {
 public:
  WithoutLimits() : before_(set(std::nullopt)) {}
  ~WithoutLimits() { set(before_); }
  WithoutLimits(const WithoutLimits&) = delete;
  WithoutLimits& operator=(const WithoutLimits&) = delete;

 private:
  static int64_t set(std::optional<int64_t> limits) {
    const auto op = find_operator("ascend_attn_ops::_set_thread_limits");
    return op ? op->typed<int64_t(std::optional<int64_t>)>().call(limits) : 0;
  }

  int64_t before_;
};

// Copies the results of the PyTorch operator to the outputs, as far as the device would.
void compute(const Function& function, std::vector<Value> values, const Launch& launch) {
  const WithoutLimits without_limits;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const Call call(function, values, launch);
  check_faults(call, function.device.faults);
  if (function.device.change) {
    function.device.change(call);
  }
  const auto stack = function.compute ? function.compute(call) : call.results();
  size_t next = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const auto& argument = function.arguments[i];
    if (!is_output(argument.kind)) {
      continue;
    }
    const size_t result = argument.result == Argument::kNextResult ? next++ : argument.result;
    const auto* view = std::get_if<TensorView>(&values[i]);
    if (view && result < stack.size()) {
      const auto& computed = stack[result].toTensor();
      auto target = view->tensor();
      if (argument.kind == Kind::output || target.numel() == computed.numel()) {
        const auto written = [&](const at::Tensor& output) {
          const auto rule = function.device.written;
          return rule ? rule(call, argument.name, output) : output;
        };
        written(target).copy_(written(computed.view(target.sizes())));
      }
    }
  }
  if (function.device.spoil) {
    function.device.spoil(call);
  }
}

int run(const aclOpExecutor& executor, void* workspace) {
  if (workspace) {
    // A device destroys other data there as well.
    std::memset(workspace, 0xA5, executor.workspace_size);
  }
  const auto alteration = alteration_of_test();
  return without_exceptions(executor.function, kRuntime, [&] {
    auto values = executor.values;
    alter_numbers(executor.function, values, alteration);
    compute(executor.function, values, executor.launch);
    alter_tensors(executor.function, values, alteration);
  });
}

// The error of a call that touches memory out of turn.
std::string order_error(const aclOpExecutor& executor, void* workspace, aclrtStream stream) {
  if (!streams_are_strict() || is_capturing(stream)) {
    return {};
  }
  std::vector<Range> reads;
  std::vector<Range> writes{{workspace, executor.workspace_size}};
  const auto& arguments = executor.function.arguments;
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& ranges = is_output(arguments[i].kind) ? writes : reads;
    for (const auto& view : views_of(executor.values[i])) {
      if (view.data && device_of_address(view.data) >= 0) {
        const auto tensor = view.tensor();
        const auto bytes =
            at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
        ranges.push_back({tensor.data_ptr(), bytes});
      }
    }
  }
  return check_order(stream, executor.function.name, reads, writes);
}

}  // namespace

uint64_t workspace_of(const Function& function) {
  return take_fault(function.name, 0) ? kMoreThanThereIs : function.workspace;
}

torch::jit::Stack call_operator(std::string_view name, std::string_view overload,
                                const OperatorArguments& arguments) {
  const auto op = operator_named(std::string(name), std::string(overload));
  torch::jit::Stack stack;
  for (const auto& parameter : op.schema().arguments()) {
    if (const auto given = arguments.find(parameter.name()); given != arguments.end()) {
      const auto& value = given->second;
      const bool is_lengths =
          value.isIntList() && parameter.type()->isSubtypeOf(*c10::OptionalType::ofTensor());
      stack.push_back(is_lengths ? c10::IValue(at::tensor(value.toIntVector())) : value);
    } else {
      TORCH_CHECK(parameter.default_value(), name, ": no value for ", parameter.name());
      stack.push_back(*parameter.default_value());
    }
  }
  op.callBoxed(stack);
  return stack;
}

torch::jit::Stack Call::results(const OperatorArguments& others) const {
  auto arguments = others;
  for (size_t i = 0; i < values_.size(); ++i) {
    arguments.try_emplace(std::string(function_.arguments[i].schema),
                          is_absent(function_, values_, i) ? c10::IValue() : to_ivalue(values_[i]));
  }
  return call_operator(function_.schema_name, function_.overload, arguments);
}

int prepare_values(const Function& function, std::vector<Value> values, uint64_t* workspace_size,
                   aclOpExecutor** executor) {
  log([&] {
    return Json::object({{"phase", int64_t{1}},
                         {"function", std::string(function.name)},
                         {"arguments", json_of(function, values)},
                         {"device", int64_t{current_device()}},
                         {"deterministic", system_parameter(ACL_OPT_DETERMINISTIC)}});
  });
  call_listener(function.name.data());
  if (const auto fault = take_fault(function.name, 1)) {
    return failure(fault->status, fault->message);
  }
  const Launch launch{.deterministic = system_parameter(ACL_OPT_DETERMINISTIC) != 0};
  const int status = without_exceptions(function, kInvalid, [&] {
    for (size_t i = 0; i < values.size(); ++i) {
      check_value(function, values, i);
    }
    if (function.device.check && !values.empty()) {
      function.device.check({function, values, launch});
    }
  });
  if (status != ACL_SUCCESS) {
    return status;
  }
  *workspace_size = workspace_of(function);
  *executor = new aclOpExecutor({function, std::move(values), *workspace_size, launch});
  keep_executor(**executor);
  return ACL_SUCCESS;
}

int execute(void* workspace, uint64_t workspace_size, aclOpExecutor* executor, aclrtStream stream) {
  // The second phase consumes the executor, whatever becomes of the call.
  const std::shared_ptr<aclOpExecutor> owned(executor);
  end_executor(*executor);
  const auto& function = owned->function;
  log([&] {
    return Json::object({{"phase", int64_t{2}},
                         {"function", std::string(function.name)},
                         {"stream", int64_t{stream_id(stream)}},
                         {"device", int64_t{device_of_stream(stream)}},
                         {"workspace", static_cast<int64_t>(workspace_size)}});
  });
  count(Outcome::aclnn, function.name);
  if (is_writing_calls()) {
    write_call(Json::object({{"function", std::string(function.name)},
                             {"arguments", json_of(function, owned->values)},
                             {"device", int64_t{device_of_stream(stream)}},
                             {"stream", int64_t{stream_id(stream)}},
                             {"process", int64_t{getpid()}}})
                   .text());
  }
  if (const auto fault = take_fault(function.name, 2)) {
    return failure(fault->status, fault->message);
  }
  if (workspace_size < owned->workspace_size ||
      (workspace_size > 0 && device_of_address(workspace) != device_of_stream(stream))) {
    return failure(kRuntime, c10::str(function.name, ": the workspace is less than was asked for"));
  }
  for (const auto& value : owned->values) {
    for (const auto& view : views_of(value)) {
      if (!view.sizes.empty() && view.data &&
          device_of_address(view.data) != device_of_stream(stream)) {
        return failure(kRuntime, c10::str(function.name, ": a tensor of another device"));
      }
    }
  }
  if (auto error = order_error(*owned, workspace, stream); !error.empty()) {
    return failure(kRuntime, error);
  }
  if (owned->kept) {
    owned->kept->usable = true;
  }
  if (auto fault = take_fault(function.name, 3)) {
    fail_at_wait(fault->status, std::move(fault->message));
    return ACL_SUCCESS;
  }
  if (!computes()) {
    return ACL_SUCCESS;
  }
  owned->launch.stream = stream;
  return submit(stream, [owned, workspace] { return run(*owned, workspace); });
}

bool is_missing(std::string_view function) {
  const char* names = std::getenv("CANN_SIM_WITHOUT");  // with commas between them
  const auto quoted = ',' + std::string(function) + ',';
  return names && (',' + std::string(names) + ',').find(quoted) != std::string::npos;
}

}  // namespace cann_sim
