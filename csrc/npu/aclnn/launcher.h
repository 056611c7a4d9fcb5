// The one way to call aclnn:
//
//   constexpr Launcher<LightningIndexer, int(AclTensor query, ...)> aclnn_lightning_indexer;
//   aclnn_lightning_indexer(op.query, op.key, op.weights, ...);
//
// takes the arguments of the prototype in its order: tensors (optional ones become null pointers),
// lists of tensors or integers, texts and numbers. A wrong number of arguments or a wrong type does
// not compile.
//
//   aclnn_lightning_indexer.with(fills)(op.query, ...);
//
// fills outputs before the call, as a part of it.
//
// The call goes through torch_npu's task queue to the current stream of the tensors' device. It
// never waits for the device. An error of the device is raised at the call, or, when the queue's
// thread meets it, by torch_npu at the next synchronisation.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "npu/aclnn/arguments.h"
#include "npu/aclnn/executor_cache.h"

namespace ascend_attn::aclnn {

// Where a function is looked for: an operator whose `functions_of_cann_alone` is set has functions
// whose names others give to functions with other arguments.
enum class Origin { anywhere, cann_alone };

// An aclnn function in the CANN of this process.
struct Function {
  // Raises when the CANN of this process lacks it.
  Function(const char* op, const char* name, bool reuses_executor,
           Origin origin = Origin::anywhere);

  const char* op;
  std::string name;
  bool reuses_executor;
  void* first_phase;
  void* second_phase;
};

// The arguments of one call. They are on the caller's stack, and move to the heap only when the
// first phase runs later.
class Arguments {
 public:
  virtual ~Arguments() = default;
  // Calls the first phase; returns the owner of the handles that it was given.
  virtual std::shared_ptr<void> first_phase(const Function& function, int& status,
                                            uint64_t* workspace_size,
                                            aclOpExecutor** executor) const = 0;
  virtual void add_to(ExecutorKey& key) const = 0;
  virtual std::shared_ptr<const Arguments> to_heap() = 0;
};

template <typename... Parameters>
class TypedArguments final : public Arguments {
 public:
  // Each is made in its place: two dozen of them would be three kilobytes to move.
  template <typename... Given>
  explicit TypedArguments(const Given&... given) : arguments_(given...) {}

  std::shared_ptr<void> first_phase(const Function& function, int& status, uint64_t* workspace_size,
                                    aclOpExecutor** executor) const override {
    using FirstPhase = int (*)(Parameters..., uint64_t*, aclOpExecutor**);
    const auto call = reinterpret_cast<FirstPhase>(function.first_phase);
    return std::apply(
        [&](const auto&... argument) {
          auto handles =
              std::make_shared<std::tuple<decltype(argument.create())...>>(argument.create()...);
          status = std::apply(
              [&](const auto&... handle) {
                return call(pointer(handle)..., workspace_size, executor);
              },
              *handles);
          return handles;
        },
        arguments_);
  }
  void add_to(ExecutorKey& key) const override {
    std::apply([&](const auto&... argument) { (argument.add_to(key), ...); }, arguments_);
  }
  std::shared_ptr<const Arguments> to_heap() override {
    return std::make_shared<TypedArguments>(std::move(*this));
  }

  // The device of the tensors, which must be one NPU.
  c10::Device device(const Function& function) const;

 private:
  template <typename T>
  static auto pointer(const T& handle) {
    if constexpr (requires { handle.get(); }) {
      return handle.get();
    } else {
      return handle;
    }
  }

  std::tuple<ArgumentFor<Parameters>...> arguments_;
};

// Checks that a tensor has its elements in the order of its strides, and is on the device of the
// first; `position` counts arguments.
void check_tensor(const Function& function, int position, const TensorArgument& tensor,
                  std::optional<c10::Device>& first);

template <typename... Parameters>
c10::Device TypedArguments<Parameters...>::device(const Function& function) const {
  std::optional<c10::Device> first;
  int position = 0;
  const auto check = [&](const auto& argument) {
    ++position;
    if constexpr (requires { argument.tensors(); }) {
      for (const auto& tensor : argument.tensors()) {
        check_tensor(function, position, tensor, first);
      }
    }
  };
  std::apply([&](const auto&... argument) { (check(argument), ...); }, arguments_);
  return *first;
}

// Bytes of an output that are written before a call, which leaves some of them as they are.
struct Fill {
  void* data;
  size_t bytes;
  uint8_t value;
};
using Fills = c10::SmallVector<Fill, 3>;

// While it lives, the calls of this thread have a tensor of their caller as workspace: one without
// elements, which gets what a call asks for, or one that must be large enough. The task queue's
// thread does not see it, at the level at which it allocates (2, at which nothing is captured).
class GivenWorkspace {
 public:
  // Null: every call allocates its own.
  explicit GivenWorkspace(const at::Tensor* tensor) : outer_(std::exchange(current_, tensor)) {}
  ~GivenWorkspace() { current_ = outer_; }
  GivenWorkspace(const GivenWorkspace&) = delete;
  GivenWorkspace& operator=(const GivenWorkspace&) = delete;

  static const at::Tensor* current() { return current_; }

 private:
  static thread_local const at::Tensor* current_;
  const at::Tensor* outer_;
};

// While it is on, the calls of this thread end after their first phase: CANN says whether it
// accepts them, and nothing is launched. For `python -m ascend_attn_check`, which makes calls
// that a device may not survive.
void set_first_phase_only(bool on);

// Whether calls on the current stream become part of a graph instead of running.
bool is_capturing();

// Whether the context of the device is deterministic during a first phase; none: as it is.
using ContextDeterminism = std::optional<bool>;
inline ContextDeterminism deterministic_if(bool on) {
  return on ? ContextDeterminism(true) : std::nullopt;
}

void enqueue(const Function& function, c10::Device device, ContextDeterminism deterministic,
             Arguments& arguments, c10::ArrayRef<Fill> fills);

// Calls one of the aclnn functions that `Op` declares.
template <typename Op, typename Prototype, size_t index = 0>
struct Launcher;

template <typename Op, typename... Parameters, size_t index>
struct Launcher<Op, int(Parameters...), index> {
  static constexpr const char* name = Op::functions[index];

  // Marks functions whose executors torch_npu reuses too; for all others it switches reuse off, and
  // so do we (tests/npu/test_npu_conformance.py records both).
  bool reuses_executor = false;
  c10::ArrayRef<Fill> fills = {};
  // For functions that obey their context and not their argument `deterministic`.
  ContextDeterminism deterministic = {};

  template <typename... Given>
    requires(sizeof...(Given) == sizeof...(Parameters)) &&
            (std::convertible_to<const Given&, ArgumentFor<Parameters>> && ...)
  void operator()(const Given&... given) const {
    constexpr bool cann_alone = requires { Op::functions_of_cann_alone; };
    static const Function function(Op::name, name, reuses_executor,
                                   cann_alone ? Origin::cann_alone : Origin::anywhere);
    TypedArguments<Parameters...> all(given...);
    enqueue(function, all.device(function), deterministic, all, fills);
  }

  // `outputs` must outlive the launcher.
  Launcher with(const Fills& outputs) const { return {reuses_executor, outputs, deterministic}; }
  Launcher in_context(ContextDeterminism is_deterministic) const {
    return {reuses_executor, fills, is_deterministic};
  }
};

}  // namespace ascend_attn::aclnn
