// libopapi.so of the simulated CANN: handles, and how an aclnn function is defined.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <acl/acl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "ascendcl/json.h"
#include "ascendcl/runtime.h"

namespace cann_sim {

// Handles that a caller has to give back: the number of those that still exist.
template <typename Handle>
class Counted {
 public:
  static int64_t live() { return count_; }

 protected:
  Counted() { ++count_; }
  Counted(const Counted&) { ++count_; }
  ~Counted() { --count_; }

 private:
  static inline std::atomic<int64_t> count_{0};
};

// The arguments of aclCreateTensor.
struct TensorView {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  std::vector<int64_t> storage_sizes;
  int64_t offset;
  aclDataType dtype;
  aclFormat format;
  void* data;

  at::Tensor tensor() const;
};

struct Scalar {
  double value;
  aclDataType dtype;
};

at::ScalarType scalar_type(aclDataType dtype);
// Whether a test wants this maker of handles to fail.
bool gives_no_handle(std::string_view maker);
// Another tensor of its dtype in the place of one.
TensorView in_place_of(const TensorView& view, const at::Tensor& tensor);

}  // namespace cann_sim

struct aclTensor : cann_sim::Counted<aclTensor> {
  explicit aclTensor(cann_sim::TensorView view) : view(std::move(view)) {}
  cann_sim::TensorView view;
};

// It owns its tensors.
struct aclTensorList : cann_sim::Counted<aclTensorList> {
  explicit aclTensorList(std::vector<const aclTensor*> tensors) : tensors(std::move(tensors)) {}
  aclTensorList(const aclTensorList&) = delete;
  ~aclTensorList() {
    for (const auto* tensor : tensors) {
      delete tensor;
    }
  }
  std::vector<const aclTensor*> tensors;
};

struct aclIntArray : cann_sim::Counted<aclIntArray> {
  explicit aclIntArray(std::vector<int64_t> values) : values(std::move(values)) {}
  std::vector<int64_t> values;
};

struct aclScalar : cann_sim::Counted<aclScalar> {
  explicit aclScalar(cann_sim::Scalar scalar) : scalar(scalar) {}
  cann_sim::Scalar scalar;
};

struct aclOpExecutor;

namespace cann_sim {

// The C types of prototypes.
using Tensor = const aclTensor*;
using TensorList = const aclTensorList*;
using IntArray = const aclIntArray*;

// Statuses that CANN returns.
constexpr int kNoTensor = -1;
constexpr int kNullPointer = 161001;
constexpr int kInvalid = 161002;
constexpr int kRuntime = 361001;
constexpr int kTiling = 561002;
constexpr int kInnerNullPointer = 561103;

// The dtypes that an argument may have; an empty list: any.
class Dtypes {
 public:
  constexpr Dtypes(std::initializer_list<aclDataType> dtypes) {
    for (const auto dtype : dtypes) {
      bits_ |= uint64_t{1} << dtype;
    }
  }
  constexpr bool allow(aclDataType dtype) const {
    return bits_ == 0 || (dtype >= 0 && (bits_ >> dtype & 1) != 0);
  }

 private:
  uint64_t bits_ = 0;
};
inline constexpr Dtypes kHalf{ACL_FLOAT16, ACL_BF16};
inline constexpr Dtypes kHalfOrFloat{ACL_FLOAT16, ACL_BF16, ACL_FLOAT};
inline constexpr Dtypes kFloat{ACL_FLOAT};
inline constexpr Dtypes kInt32{ACL_INT32};

enum class Kind {
  input,
  input_or_none,
  optional_input,
  output,
  optional_output,
  attribute,
  lengths,
  not_computed
};

struct Argument {
  std::string_view name = {};    // in the C prototype
  std::string_view schema = {};  // in the schema of the PyTorch operator; empty when it has none
  Kind kind = Kind::attribute;
  Dtypes dtypes = {};
  int64_t result = kNextResult;  // of the PyTorch operator: what an output gets
  int status_of_null = kNullPointer;
  std::string_view model = {};  // the input whose dtype an output has, and its sizes
  bool has_sizes_of_model = false;

  static constexpr int64_t kNextResult = -1;
};

// Arguments in the order of a prototype, in which they have the types T.
template <typename... T>
struct Arguments {
  std::array<Argument, sizeof...(T)> each = {};

  // CANN returns another status for a null pointer.
  constexpr Arguments or_status(int status) const {
    auto changed = *this;
    changed.each.back().status_of_null = status;
    return changed;
  }
  // An output that has a dtype, that of an input, or the sizes of the input as well.
  constexpr Arguments in(Dtypes dtypes) const {
    auto changed = *this;
    changed.each.back().dtypes = dtypes;
    return changed;
  }
  constexpr Arguments of_dtype_of(std::string_view input) const {
    auto changed = *this;
    changed.each.back().model = input;
    return changed;
  }
  constexpr Arguments like(std::string_view input) const {
    auto changed = of_dtype_of(input);
    changed.each.back().has_sizes_of_model = true;
    return changed;
  }
};
template <typename... T, typename... Others>
constexpr Arguments<T..., Others...> operator+(const Arguments<T...>& first,
                                               const Arguments<Others...>& others) {
  Arguments<T..., Others...> all;
  std::ranges::copy(others.each, std::ranges::copy(first.each, all.each.begin()).out);
  return all;
}
template <typename... Parts>
constexpr auto join(const Parts&... parts) {
  return (parts + ...);
}

template <typename T = Tensor>
constexpr Arguments<T> input(std::string_view name, std::string_view schema = {},
                             Dtypes dtypes = {}) {
  return {{{{name, schema, Kind::input, dtypes}}}};
}
constexpr Arguments<Tensor> optional_input(std::string_view name, std::string_view schema = {},
                                           Dtypes dtypes = {}) {
  return {{{{name, schema, Kind::optional_input, dtypes}}}};
}
// A required tensor that stands for none when it has no axes.
constexpr Arguments<Tensor> input_or_none(std::string_view name, std::string_view schema,
                                          Dtypes dtypes = {}) {
  return {{{{name, schema, Kind::input_or_none, dtypes}}}};
}
template <typename T>
constexpr Arguments<T> attribute(std::string_view name, std::string_view schema = {}) {
  return {{{{name, schema, Kind::attribute}}}};
}
// A list of sequence lengths: none, when it is empty and the layout is not TND.
constexpr Arguments<IntArray> lengths(std::string_view name, std::string_view schema) {
  return {{{{name, schema, Kind::lengths}}}};
}
constexpr Arguments<Tensor> output(std::string_view name, int64_t result = Argument::kNextResult) {
  return {{{{name, {}, Kind::output, {}, result}}}};
}
// An output that the operator takes as an argument.
constexpr Arguments<Tensor> in_place(std::string_view name, std::string_view schema) {
  return {{{{name, schema, Kind::output}}}};
}
// An output that the caller may leave out, or give with no elements.
constexpr Arguments<Tensor> optional_output(std::string_view name,
                                            int64_t result = Argument::kNextResult) {
  return {{{{name, {}, Kind::optional_output, {}, result}}}};
}
// Arguments that the simulation has no computation for: a call that gives one is refused, by its
// name.
template <typename T = Tensor, typename... Names>
constexpr auto not_computed(Names... names) {
  return (Arguments<T>{{{{names, {}, Kind::not_computed}}}} + ...);
}

// The value of one argument; the executor keeps a copy.
using Value = std::variant<std::nullptr_t, TensorView, std::vector<TensorView>,
                           std::vector<int64_t>, Scalar, double, int64_t, bool, std::string>;

class Call;

struct Refusal : std::runtime_error {
  Refusal(int status, const std::string& text) : std::runtime_error(text), status(status) {}
  int status;
};

// The harm that a fault of a kernel does: a read or write out of bounds, a wait that never ends, or
// results that are wrong.
enum class Harm : unsigned { bounds = 1, hang = 2, results = 4 };

// A call that the kernels of A2 and A3 compute wrong without an error, as their execution has
// shown. The simulated call ends in an error instead, unless CANN_SIM_UNCHECKED names the harm.
struct KernelFault {
  Harm harm;
  // Describes the fault and its effect in one line; empty if the call has none.
  std::string (*find)(const Call&);
};

// Returns whether the product's kernels have such faults and CANN_SIM_UNCHECKED does not name them.
bool has_faults(Harm harm);
// Raises for the first fault that the call meets.
void check_faults(const Call& call, const std::vector<KernelFault>& faults);

// Differences between the device and the operator, by product and release of CANN
// (docs/device.md).
struct DeviceRules {
  // Raises for a call that the first phase refuses: a Refusal, or any error for kInvalid.
  void (*check)(const Call&) = nullptr;
  // Changes the arguments to what the kernel takes them for.
  void (*change)(const Call&) = nullptr;
  // The part of an output, by its name, that the kernel writes: the rest of its memory stays as it
  // is.
  at::Tensor (*written)(const Call&, std::string_view name, const at::Tensor& output) = nullptr;
  // Destroys what the kernel computes wrong. Raises where it fails.
  void (*spoil)(const Call&) = nullptr;
  std::vector<KernelFault> faults = {};
};

struct Function {
  // The operator that computes it on the CPU, and its overload. Its results are copied to the
  // outputs, in order; for an operator with no results the outputs are arguments that it changes.
  std::string_view schema_name = "";
  std::string_view overload = "";
  uint64_t workspace = 0;
  DeviceRules device = {};
  // Computes the results itself, with no operator or around `Call::results`.
  torch::jit::Stack (*compute)(const Call&) = nullptr;
  // The status where CANN's l0op::ViewCopy cannot write a result to an output: one of another
  // dtype, or of other sizes.
  int status_of_copy = kInnerNullPointer;
  std::string_view name = {};
  std::vector<Argument> arguments = {};
};

// Arguments of an operator by their names in its schema.
using OperatorArguments = std::map<std::string, c10::IValue>;

// The results of an operator. Arguments that are missing have their defaults.
torch::jit::Stack call_operator(std::string_view name, std::string_view overload,
                                const OperatorArguments& arguments);

// How a call is launched.
struct Launch {
  bool deterministic = false;
  aclrtStream stream = nullptr;
};

// The arguments of a call by name.
class Call {
 public:
  Call(const Function& function, std::vector<Value>& values, Launch launch = {})
      : function_(function), values_(values), launch_(launch) {}

  const Launch& launch() const { return launch_; }

  template <typename T>
  T& get(std::string_view name) const {
    auto* const place = find_value(name);
    TORCH_CHECK(place, function_.name, " has no argument ", name);
    return std::get<T>(*place);
  }
  // Null for an argument that the call leaves out or the function does not have.
  template <typename T>
  T* find(std::string_view name) const {
    auto* const place = find_value(name);
    return place ? std::get_if<T>(place) : nullptr;
  }
  bool is_tnd(std::string_view layout) const { return get<std::string>(layout) == "TND"; }
  // The elements of an int32 tensor, which must have been computed by now.
  std::vector<int64_t> elements(std::string_view name) const;
  // A view of a tensor; for an optional one that the call leaves out, none.
  at::Tensor tensor(std::string_view name) const { return get<TensorView>(name).tensor(); }
  std::optional<at::Tensor> optional_tensor(std::string_view name) const;
  // The PyTorch operator's results for views of the arguments, some of them replaced by `others`.
  torch::jit::Stack results(const OperatorArguments& others = {}) const;
  // The result of an operator that has one, with other arguments in the place of some.
  at::Tensor result_with(std::vector<std::pair<std::string_view, Value>> others) const;

 private:
  Value* find_value(std::string_view name) const;

  const Function& function_;
  std::vector<Value>& values_;
  Launch launch_;
};

// For the arguments of a kernel that writes the rows of the sequences in layout TND and leaves
// those behind them alone. `axis` is that of the tokens, `ends` names the cumulative lengths.
at::Tensor rows_of_sequences(const Call& call, const at::Tensor& output, int64_t axis,
                             std::string_view layout, std::string_view ends);

// The arguments of a call, for logs.
Json json_of(const Function& function, const std::vector<Value>& values);

// The tensors of an argument: itself, those of a list, or none.
std::span<const TensorView> views_of(const Value& value);

// Host memory of an executor and of its handles. CANN has 4,096 of these.
struct HugeMemory : Counted<HugeMemory> {};

// A call between its two phases.
struct Prepared {
  const Function& function;
  std::vector<Value> values;
  uint64_t workspace_size;
  Launch launch;
};
// A later call may have it once the second phase is over. Without one, its key is taken for good.
struct KeptExecutor : Prepared {
  explicit KeptExecutor(const Prepared& prepared) : Prepared(prepared) {}
  std::atomic<bool> usable{false};
};

}  // namespace cann_sim

struct aclOpExecutor : cann_sim::Counted<aclOpExecutor>, cann_sim::Prepared {
  explicit aclOpExecutor(cann_sim::Prepared prepared);

  std::shared_ptr<cann_sim::KeptExecutor> kept;  // for later calls
  cann_sim::HugeMemory* memory;                  // that of the thread when it was made
};

namespace cann_sim {

// Keeps a copy of a first phase's executor for later calls, if the call has announced a key.
void keep_executor(aclOpExecutor& executor);
// Makes the memory of an executor, which ends, the one that ReleaseHugeMem of this thread releases.
void end_executor(const aclOpExecutor& executor);

// The workspace that a call asks for: more than there is, if a test wants that.
uint64_t workspace_of(const Function& function);

Value value_of(const aclTensor* tensor);
Value value_of(const aclTensorList* list);
Value value_of(const aclIntArray* array);
Value value_of(const aclScalar* scalar);
Value value_of(const char* text);
inline Value value_of(double number) { return number; }
inline Value value_of(int64_t number) { return number; }
inline Value value_of(bool flag) { return flag; }
inline Value value_of(aclDataType dtype) { return int64_t{dtype}; }

// Whether anybody looks at the arguments of a call: a test that listens, or the computation.
bool watched();

// Appends a step to the log, while a test listens.
void log_step(std::string_view step);

int prepare_values(const Function& function, std::vector<Value> values, uint64_t* workspace_size,
                   aclOpExecutor** executor);

// The second phase of every function.
int execute(void* workspace, uint64_t workspace_size, aclOpExecutor* executor, aclrtStream stream);

// A function whose arguments have the types T.
template <typename... T>
struct Declared : Function {};

template <typename... T>
Declared<T...> with_arguments(Function function, const Arguments<T...>& arguments) {
  function.arguments = {arguments.each.begin(), arguments.each.end()};
  return {std::move(function)};
}
template <typename... Parts>
auto declared(std::string_view name, Function function, const Parts&... arguments) {
  function.name = name;
  return with_arguments(std::move(function), join(arguments...));
}

// The first phase of a function: logs and checks the arguments.
template <const auto& function, typename Type = std::remove_cvref_t<decltype(function)>>
struct FirstPhase;
template <const auto& function, typename... T>
struct FirstPhase<function, Declared<T...>> {
  static int run(T... arguments, uint64_t* workspace_size, aclOpExecutor** executor) {
    return prepare_values(
        function, watched() ? std::vector<Value>{value_of(arguments)...} : std::vector<Value>(),
        workspace_size, executor);
  }
};

// Whether the chosen device lacks a function.
bool is_missing(std::string_view function);

}  // namespace cann_sim

// Exports a function under a name in C. A look-up gets its address from here, or null.
#define CANN_SIM_EXPORT(symbol, aclnn, function)                                               \
  extern "C" {                                                                                 \
  __attribute__((visibility("hidden"))) void (*address_of_##symbol())() {                      \
    return cann_sim::is_missing(#aclnn) ? nullptr : reinterpret_cast<void (*)()>(&(function)); \
  }                                                                                            \
  void symbol() __attribute__((ifunc("address_of_" #symbol)));                                 \
  }

// Defines an aclnn function by what a Function holds beside its name, and by its arguments.
#define CANN_SIM_FUNCTION(aclnn, ...)                                                          \
  const auto declared_##aclnn = cann_sim::declared(#aclnn, __VA_ARGS__);                       \
  CANN_SIM_EXPORT(aclnn##GetWorkspaceSize, aclnn, cann_sim::FirstPhase<declared_##aclnn>::run) \
  CANN_SIM_EXPORT(aclnn, aclnn, cann_sim::execute)
