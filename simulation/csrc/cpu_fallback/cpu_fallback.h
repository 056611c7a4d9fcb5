// Runs operators of torch for which the simulated NPU has no kernel: the CPU's kernel computes in
// the memory of the NPU tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <acl/acl.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace cann_sim {

// Facts of a schema, read once and not in every call.
struct Operator {
  explicit Operator(const c10::OperatorHandle& handle);

  c10::OperatorHandle handle;
  c10::OperatorHandle computed_by;  // of the same arguments and results
  std::optional<size_t> generator;  // the argument that is one
  std::optional<size_t> device;
  bool writes = false;  // to some of its arguments
  bool is_random = false;
  bool takes_cpu_tensors = false;  // beside those of the NPU
  bool last_result_on_cpu = false;
};

// The CPU tensors in the place of the NPU tensors of one call. They have the same memory, so that
// nothing is copied, and what is written to one is written to the other.
class Aliases {
 public:
  // Raises for a tensor of another NPU than the first.
  at::Tensor of(const at::Tensor& npu);
  // The NPU tensor for a result of the CPU: an argument itself, a view of one, or a new tensor.
  at::Tensor back(const at::Tensor& cpu) const;
  // Brings back the arguments that the CPU has given another size or other memory.
  void resize_arguments() const;

  std::optional<c10::Device> device;

 private:
  struct Pair {
    at::Tensor npu;
    at::Tensor cpu;
    c10::Storage memory;
    void* address;
  };
  // The pair with a tensor, or else with its storage, on either side; null if there is none.
  const Pair* find(const at::Tensor& tensor) const;
  void add(Pair pair);

  c10::SmallVector<Pair, 8> pairs_;
  // By tensor and by storage, once there are many, as of an optimizer: those of most calls are
  // found faster by looking at all.
  static constexpr size_t kMany = 16;
  std::unordered_map<const void*, size_t> places_;
};

// A kernel as a function, and that which an operator has for a key now.
using Kernel =
    std::function<void(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack*)>;
Kernel kernel_of(const c10::OperatorHandle& op, c10::DispatchKey key);
torch::CppFunction boxed(Kernel kernel);

// Runs an operator, with the arguments on the stack, on the CPU; results take their place.
void run_on_cpu(const Operator& op, torch::jit::Stack& stack);

// The operators of a library that have a kernel for the NPU.
std::vector<c10::OperatorHandle> operators_for_npu(std::string_view library);

// Makes operators of torch_npu that the simulation cannot compute raise NotImplementedError.
void name_what_is_missing();
// The same for those that call ATB, and computes others.
void replace_atb_operators();

// The end of an error: how a user supplies an operator.
std::string remedy(const std::string& name);
// Raises NotImplementedError, and counts it for the report.
[[noreturn]] void refuse(const std::string& name, const std::string& why);

// Waits until the task queue of the current stream is empty, not for the stream.
aclrtStream after_queued_work(c10::Device device);

// All memory of a nested tensor, as a tensor of one axis.
at::Tensor memory_of_nested(const at::Tensor& nested);

// Memory of the NPU with the elements of a CPU tensor.
at::Tensor on_npu(const at::Tensor& cpu, c10::Device device);

// The numbers that one call draws from a generator of the NPU, which moves on: seeds, saved states
// and restored ones do what they do on an NPU.
class RandomNumbers {
 public:
  explicit RandomNumbers(at::Generator npu);
  // Returns a CPU generator for the call, or for a replay of it, before which torch_npu writes the
  // seed and the offset.
  at::Generator generator() const;

 private:
  uint64_t seed_ = 0;
  uint64_t offset_ = 0;
  // Null unless the call is captured.
  const int64_t* replayed_seed_ = nullptr;
  const int64_t* replayed_offset_ = nullptr;
};

}  // namespace cann_sim
