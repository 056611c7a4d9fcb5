// libcpu_fallback.so: registers the CPU's kernels for the operators of torch that the simulation
// has no aclnn function for. libascendcl.so loads it when torch_npu starts to use the NPU.
#include "cpu_fallback/cpu_fallback.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch_npu/csrc/aten/NPUGeneratorImpl.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "ascendcl/report.h"
#include "ascendcl/runtime.h"
#include "ascendcl/stream_order.h"

namespace cann_sim {
namespace {

// torch_npu's own: what allocates, moves or views memory and computes nothing.
constexpr std::string_view kTorchNpus =
    " _copy_from _copy_from_and_resize _local_scalar_dense _pin_memory _reshape_alias "
    "_resize_output_ _to_copy alias as_strided as_strided_ contiguous copy_ detach empty "
    "empty_like empty_strided is_pinned is_set_to new_empty new_empty_strided pin_memory "
    "record_stream resize_ resize_as_ set_ set_data squeeze unfold unsqueeze view view_as_complex "
    "view_as_real ";

// Their indices and lengths may be, or must be, on the CPU.
constexpr std::string_view kTakeCpuTensors =
    " index index_put index_put_ _unsafe_index _unsafe_index_put _index_put_impl_ put_ "
    "_pack_padded_sequence ";

bool is_among(std::string_view names, std::string_view name) {
  return names.find(" " + std::string(name) + " ") != std::string_view::npos;
}

// Returns the operator of missing_operators.cpp that computes this one, if there is one.
std::optional<c10::OperatorHandle> written_here(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  return c10::Dispatcher::singleton().findSchema(
      {"cann_sim" + name.name.substr(name.name.find("::")), name.overload_name});
}

std::string_view plain_name(const c10::OperatorName& name) {
  return std::string_view(name.name).substr(name.name.find("::") + 2);
}

// Lets a call draw its numbers: from an argument, or in the place of the CPU's own generator, from
// which an operator draws that takes none. Another thread that draws from that one at the same time
// gets the same numbers.
class Drawing {
 public:
  Drawing(const Operator& op, c10::IValue* arguments, const RandomNumbers& numbers)
      : cpus_(op.generator ? at::Generator() : at::detail::getDefaultCPUGenerator()) {
    const auto drawn = numbers.generator();
    if (op.generator) {
      arguments[*op.generator] = drawn;
      return;
    }
    const std::lock_guard lock(cpus_.mutex());
    state_ = cpus_.get_state();
    cpus_.set_state(drawn.get_state());
  }
  ~Drawing() {
    if (cpus_.defined()) {
      const std::lock_guard lock(cpus_.mutex());
      cpus_.set_state(state_);
    }
  }
  Drawing(const Drawing&) = delete;
  Drawing& operator=(const Drawing&) = delete;

 private:
  at::Generator cpus_;
  at::Tensor state_;
};

// Returns the numbers that an operator draws, if it draws from the NPU.
std::optional<RandomNumbers> numbers_of(const Operator& op, const c10::IValue* arguments,
                                        c10::DeviceIndex device) {
  if (!op.is_random) {
    return std::nullopt;
  }
  if (!op.generator || arguments[*op.generator].isNone()) {
    return RandomNumbers(at_npu::detail::getDefaultNPUGenerator(device));
  }
  const auto generator = arguments[*op.generator].toGenerator();
  return generator.device().is_privateuseone() ? std::optional(RandomNumbers(generator))
                                               : std::nullopt;
}

// Runs `function` on every tensor of a value, and puts its results in their place.
template <typename Function>
void replace_tensors(c10::IValue& value, const Function& function) {
  if (value.isTensor()) {
    if (const auto& tensor = value.toTensor(); tensor.defined()) {
      value = function(tensor);
    }
  } else if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) {
      tensor = tensor.defined() ? function(tensor) : tensor;
    }
    value = c10::IValue(std::move(tensors));
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      tensors.push_back(tensor && tensor->defined() ? std::optional(function(*tensor)) : tensor);
    }
    value = c10::IValue(std::move(tensors));
  } else if (value.isTuple()) {
    auto elements = value.toTupleRef().elements().vec();
    for (auto& element : elements) {
      replace_tensors(element, function);
    }
    value = c10::ivalue::Tuple::create(std::move(elements));
  }
}

// Copies a result that a replay has computed to where the captured call had it.
void write(const c10::IValue& computed, const c10::IValue& to) {
  const auto write_one = [](const at::Tensor& from, const at::Tensor& target) {
    if (target.defined() && target.const_data_ptr() != from.const_data_ptr()) {
      target.copy_(from);
    }
  };
  if (to.isTensor()) {
    write_one(computed.toTensor(), to.toTensor());
  } else if (to.isTensorList()) {
    const auto from = computed.toTensorVector();
    const auto targets = to.toTensorVector();
    for (size_t i = 0; i < targets.size(); ++i) {
      write_one(from[i], targets[i]);
    }
  }
}

// Returns the task that runs the call in every replay of a graph. It does not keep the memory of
// tensors, which belongs to the graph's pool, as on a device.
Task replay(const Operator& op, torch::jit::Stack arguments, torch::jit::Stack results,
            std::optional<RandomNumbers> numbers) {
  for (auto& result : results) {
    replace_tensors(result, [](const at::Tensor& tensor) {
      return tensor.is_privateuseone() ? Aliases().of(tensor) : tensor;
    });
  }
  return [&op, arguments = std::move(arguments), results = std::move(results), numbers] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto stack = arguments;
    std::optional<Drawing> drawing;
    if (numbers) {
      drawing.emplace(op, stack.data(), *numbers);
    }
    op.computed_by.callBoxed(stack);
    for (size_t i = 0; i < results.size(); ++i) {
      write(stack[i], results[i]);
    }
    return ACL_SUCCESS;
  };
}

// The memory of NPU tensors that a call reads and writes.
class Touched {
 public:
  void add(const at::Tensor& tensor, bool written) {
    if (tensor.is_nested()) {
      add(memory_of_nested(tensor), written);
    } else if ((strict_ || written) && tensor.numel()) {
      const auto bytes =
          at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
      (written ? writes_ : reads_).push_back({tensor.const_data_ptr(), bytes});
    }
  }
  // Checks the ranges that were added since the last check.
  void check(aclrtStream stream, const Operator& op) {
    if (strict_ && !is_capturing(stream)) {
      const auto error = check_order(stream, op.handle.operator_name().name, reads_, writes_);
      TORCH_CHECK(error.empty(), error);
      reads_.clear();
      writes_.clear();
    }
  }
  // Saves the memory that a captured call is about to overwrite.
  void save(aclrtStream stream) const {
    if (is_recording_anywhere()) {
      for (const auto& [begin, bytes] : writes_) {
        save_until_recorded(stream, const_cast<void*>(begin), bytes);
      }
    }
  }

 private:
  bool strict_ = streams_are_strict();
  std::vector<Range> reads_;
  std::vector<Range> writes_;
};

}  // namespace

void run_on_cpu(const Operator& op, torch::jit::Stack& stack) {
  const auto& schema = op.handle.schema();
  const size_t count = schema.arguments().size();
  auto* arguments = stack.data() + stack.size() - count;
  Aliases aliases;
  Touched touched;
  bool has_cpu_tensor = false;
  for (size_t i = 0; i < count; ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    replace_tensors(arguments[i], [&](const at::Tensor& tensor) {
      if (tensor.is_privateuseone()) {
        touched.add(tensor, alias && alias->isWrite());
        return aliases.of(tensor);
      }
      has_cpu_tensor |= tensor.dim() > 0 && tensor.is_cpu();
      return tensor;
    });
  }
  TORCH_CHECK(!has_cpu_tensor || !aliases.device || op.takes_cpu_tensors,
              "Expected all tensors to be on the same device, but found at least two devices, ",
              *aliases.device, " and cpu!");
  if (op.device && arguments[*op.device].isDevice()) {
    const auto device = arguments[*op.device].toDevice();
    if (device.is_privateuseone()) {
      aliases.device = device;
      arguments[*op.device] = c10::Device(c10::kCPU);
    }
  }
  if (!aliases.device) {
    aliases.device = c10::Device(c10::kPrivateUse1);
  }
  if (!aliases.device->has_index()) {
    aliases.device = c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getDevice();
  }
  const c10::DeviceGuard device_guard(*aliases.device);
  // Work in the task queue may still write memory that is read here.
  const auto stream = after_queued_work(*aliases.device);
  TORCH_CHECK(!is_waiting(stream), op.handle.operator_name().name, " on stream ", stream_id(stream),
              " is behind an event that nothing has recorded yet; the simulated ",
              "NPU runs torch's operators at once and cannot wait for it");
  touched.check(stream, op);
  touched.save(stream);

  const auto numbers = numbers_of(op, arguments, aliases.device->index());
  std::optional<Drawing> drawing;
  if (numbers) {
    drawing.emplace(op, arguments, *numbers);
  }
  torch::jit::Stack captured;
  const bool capturing = is_capturing(stream);
  if (capturing) {
    captured.assign(arguments, arguments + count);
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    op.computed_by.callBoxed(stack);
    if (op.writes) {
      aliases.resize_arguments();
    }
    const size_t results = schema.returns().size();
    for (size_t i = stack.size() - results; i < stack.size(); ++i) {
      if (op.last_result_on_cpu && i + 1 == stack.size()) {
        continue;
      }
      replace_tensors(stack[i], [&](const at::Tensor& tensor) {
        auto result = aliases.back(tensor);
        if (result.is_privateuseone()) {
          touched.add(result, true);
        }
        return result;
      });
    }
    touched.check(stream, op);
    if (capturing) {
      submit(stream, replay(op, std::move(captured),
                            {stack.end() - static_cast<ptrdiff_t>(results), stack.end()}, numbers));
    }
  }
}

namespace {

Kernel cpu_kernel(const c10::OperatorHandle& handle) {
  return [op = std::make_shared<const Operator>(handle)](
             const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    count(Outcome::cpu, op->handle.operator_name().name);
    run_on_cpu(*op, *stack);
  };
}

// Whether a copy stays within an NPU, by the arguments of the operator.
bool stays(const c10::IValue* arguments, size_t count) {
  const auto& self = arguments[0].toTensor();
  if (count == 3) {  // copy_(self, src, non_blocking)
    return self.device() == arguments[1].toTensor().device();
  }
  // _to_copy(self, dtype, layout, device, ...). torch_npu gives float for double, as an NPU has it.
  const auto& dtype = arguments[1];
  const auto& device = arguments[3];
  const bool is_double = !dtype.isNone() && dtype.toScalarType() == at::kDouble;
  return self.is_privateuseone() && !is_double &&
         (device.isNone() || device.toDevice() == self.device());
}

// Copies within an NPU, which may convert, run here. Copies between an NPU and the host are
// torch_npu's, which puts them into a stream.
Kernel copy_kernel(const c10::OperatorHandle& handle) {
  return [op = std::make_shared<const Operator>(handle),
          torch_npus = kernel_of(handle, c10::DispatchKey::PrivateUse1)](
             const c10::OperatorHandle&, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const size_t count = op->handle.schema().arguments().size();
    if (stays(stack->data() + stack->size() - count, count)) {
      run_on_cpu(*op, *stack);
    } else {
      torch_npus(op->handle, keys, stack);
    }
  };
}

void no_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  const auto name = c10::toString(op.operator_name());
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, name, ": the simulated NPU computes what torch has a kernel for on the CPU, and this ",
      "it has none for; supply one with torch.library.impl(\"", name, "\", \"PrivateUse1\")");
}

void install() {
  // Outlives the process: kernels are called until its end.
  static auto* library = new torch::Library(torch::Library::IMPL, "aten",
                                            c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  static auto* autograd = new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
  static auto* nested = new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::NestedTensorPrivateUse1, __FILE__, __LINE__);
  // That a kernel of torch_npu is replaced is no news.
  class Quiet : public c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);

  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::")) {
      continue;
    }
    const auto op = dispatcher.findSchema(name);
    if (!op) {
      continue;
    }
    const auto full =
        name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    const bool torch_npus = op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1);
    const bool cpus = op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
    // Where only a backend has a kernel of its own, torch's derivative is that of nested tensors.
    const bool nested_derivative =
        torch_npus && !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        op->hasKernelForDispatchKey(c10::DispatchKey::Autograd) &&
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    // torch_npu's derivatives of some of torch's operators call operators of torch_npu. Here these
    // have torch's derivatives, as on a device without such operators.
    if (nested_derivative || op->hasKernelForDispatchKey(c10::DispatchKey::AutogradPrivateUse1)) {
      autograd->impl(full.c_str(), boxed(kernel_of(*op, c10::DispatchKey::AutogradXPU)));
    }
    if (full == "copy_" || full == "_to_copy") {
      library->impl(full.c_str(), boxed(copy_kernel(*op)));
    }
    const auto returns_view = [](const c10::Argument& result) {
      return result.alias_info() && !result.alias_info()->isWrite();
    };
    if (is_among(kTorchNpus, plain_name(name)) ||
        std::ranges::any_of(op->schema().returns(), returns_view)) {
      continue;
    }
    if (op->hasKernelForDispatchKey(c10::DispatchKey::NestedTensorCPU)) {
      nested->impl(full.c_str(), boxed(cpu_kernel(*op)));
    }
    if (written_here(*op) ||
        (cpus && (torch_npus || op->hasKernelForDispatchKey(c10::DispatchKey::CPU)))) {
      library->impl(full.c_str(), boxed(cpu_kernel(*op)));
    } else if (torch_npus) {
      library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&no_kernel>());
    }
  }
  name_what_is_missing();
  replace_atb_operators();
}

}  // namespace

aclrtStream after_queued_work(c10::Device device) {
  return c10_npu::getCurrentNPUStream(device.index()).stream();
}

Operator::Operator(const c10::OperatorHandle& handle)
    : handle(handle), computed_by(written_here(handle).value_or(handle)) {
  const auto& arguments = handle.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto type = arguments[i].type()->str();
    if (type.starts_with("Generator")) {
      generator = i;
    } else if (type.starts_with("Device")) {
      device = i;
    }
    writes |= arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
  }
  is_random = generator || handle.hasTag(at::Tag::nondeterministic_seeded);
  takes_cpu_tensors = is_among(kTakeCpuTensors, plain_name(handle.operator_name()));
  last_result_on_cpu = plain_name(handle.operator_name()) == "_pack_padded_sequence";
}

}  // namespace cann_sim

extern "C" void cann_sim_run_rest_on_cpu() { cann_sim::install(); }
