// The one way to call aclnn:
//
//   launch<aclnn::LightningIndexer>(op.query, op.key, op.weights, ...);
//
// takes the arguments of the prototype in its order: tensors (optional ones become null pointers),
// lists of integers, texts and numbers. A wrong number of arguments or a wrong type does not compile.
//
// The call goes through torch_npu's task queue to the current stream of the tensors' device. It never
// waits for the device. An error of the device is raised at the call, or, when the queue's thread
// meets it, by torch_npu at the next synchronisation.
#pragma once

#include <memory>
#include <tuple>
#include <utility>

#include "npu/aclnn/arguments.h"
#include "npu/aclnn/prototypes.h"

namespace ascend_attn::aclnn {

// An aclnn function in the CANN of this process.
struct Function {
  // Raises when the CANN of this process lacks it.
  Function(const char* op, const char* name);

  const char* op;
  std::string name;
  void* first_phase;
  void* second_phase;
};

// One call, its arguments in hand.
class Call {
 public:
  explicit Call(const Function& function) : function_(function) {}
  virtual ~Call() = default;

  const Function& function() const { return function_; }

  virtual int first_phase(uint64_t* workspace_size, aclOpExecutor** executor) = 0;
  // Frees the handles that the first phase was given.
  virtual void release() = 0;

 private:
  const Function& function_;
};

template <typename Prototype>
class CallOf;

template <typename... Parameters>
class CallOf<int(Parameters...)> final : public Call {
 public:
  CallOf(const Function& function, Argument<Parameters>... arguments)
      : Call(function), arguments_(std::move(arguments)...) {}

  int first_phase(uint64_t* workspace_size, aclOpExecutor** executor) override {
    handles_ = std::apply(
        [](const auto&... argument) { return Handles{argument.create()...}; }, arguments_);
    using FirstPhase = int (*)(Parameters..., uint64_t*, aclOpExecutor**);
    const auto call = reinterpret_cast<FirstPhase>(function().first_phase);
    return std::apply(
        [&](const auto&... handle) { return call(pointer(handle)..., workspace_size, executor); },
        handles_);
  }
  void release() override { handles_ = {}; }

  // The device of the tensors, which must be one NPU.
  c10::Device device() const;

 private:
  using Handles = std::tuple<decltype(std::declval<Argument<Parameters>>().create())...>;

  template <typename T>
  static auto pointer(const T& handle) {
    if constexpr (requires { handle.get(); }) {
      return handle.get();
    } else {
      return handle;
    }
  }

  std::tuple<Argument<Parameters>...> arguments_;
  Handles handles_;
};

// Checks that every tensor is on the device of the first; `position` counts arguments.
void check_device(const Function& function, int position, const c10::Device& device,
                  std::optional<c10::Device>& first);

template <typename... Parameters>
c10::Device CallOf<int(Parameters...)>::device() const {
  std::optional<c10::Device> first;
  int position = 0;
  const auto check = [&](const auto& argument) {
    ++position;
    if constexpr (requires { argument.device(); }) {
      if (argument.device()) {
        check_device(function(), position, *argument.device(), first);
      }
    }
  };
  std::apply([&](const auto&... argument) { (check(argument), ...); }, arguments_);
  return *first;
}

void enqueue(c10::Device device, std::shared_ptr<Call> call);

template <typename F, typename Prototype = typename F::Prototype>
struct Launcher;

template <typename F, typename... Parameters>
struct Launcher<F, int(Parameters...)> {
  void operator()(Argument<Parameters>... arguments) const {
    static const Function function(F::op, F::name);
    auto call = std::make_shared<CallOf<typename F::Prototype>>(function, std::move(arguments)...);
    const auto device = call->device();
    enqueue(device, std::move(call));
  }
};

template <typename F>
inline constexpr Launcher<F> launch{};

}  // namespace ascend_attn::aclnn
