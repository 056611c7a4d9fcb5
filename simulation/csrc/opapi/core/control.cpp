#include "opapi/core/control.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "ascendcl/report.h"
#include "ascendcl/stream_order.h"

namespace cann_sim {
namespace {

// State that tests set and read.
struct Control {
  std::mutex mutex;
  std::vector<Fault> faults;
  std::vector<Json> log;
  std::atomic<bool> logging{false};
  std::atomic<bool> faulty{false};
  std::atomic<bool> computing{true};
  Alteration alteration;
  std::atomic<void (*)(const char* function)> in_first_phase{nullptr};
};

Control& control() {
  static auto* instance = new Control;
  return *instance;
}

}  // namespace

std::unique_ptr<Fault> take_fault(std::string_view function, int phase) {
  if (!control().faulty) {
    return nullptr;
  }
  const std::lock_guard lock(control().mutex);
  for (auto& fault : control().faults) {
    if (fault.remaining > 0 && fault.phase == phase &&
        (fault.function.empty() || fault.function == function) && fault.before-- <= 0) {
      --fault.remaining;
      return std::make_unique<Fault>(fault);
    }
  }
  return nullptr;
}

Alteration alteration_of_test() {
  const std::lock_guard lock(control().mutex);
  return control().alteration;
}

void alter_numbers(const Function& function, std::vector<Value>& values, const Alteration& by) {
  for (size_t i = 0; by.number && i < values.size(); ++i) {
    const auto alter = [&, name = std::string(function.arguments[i].name)](auto& x) {
      x = static_cast<std::decay_t<decltype(x)>>(
          by.number(function.name.data(), name.c_str(), static_cast<double>(x)));
    };
    if (auto* number = std::get_if<double>(&values[i])) {
      alter(*number);
    } else if (auto* integer = std::get_if<int64_t>(&values[i])) {
      alter(*integer);
    } else if (auto* integers = std::get_if<std::vector<int64_t>>(&values[i])) {
      std::ranges::for_each(*integers, alter);
    }
  }
}

void alter_tensors(const Function& function, const std::vector<Value>& values,
                   const Alteration& by) {
  for (size_t i = 0; by.tensor && i < values.size(); ++i) {
    if (const auto* view = std::get_if<TensorView>(&values[i])) {
      by.tensor(function.name.data(), std::string(function.arguments[i].name).c_str(),
                at::toDLPack(view->tensor()));
    }
  }
}

void call_listener(const char* function) {
  if (auto* const listen = control().in_first_phase.load()) {
    listen(function);
  }
}

bool is_logging() { return control().logging; }

void append_to_log(Json entry) {
  const std::lock_guard lock(control().mutex);
  control().log.push_back(std::move(entry));
}

bool gives_no_handle(std::string_view maker) {
  const auto fault = take_fault(maker, -1);
  if (fault) {
    set_error_message(fault->message);
  }
  return fault != nullptr;
}

void log_step(std::string_view step) {
  log([&] { return Json::object({{"step", std::string(step)}}); });
}

bool computes() { return control().computing; }

bool watched() {
  return streams_are_strict() || computes() || control().logging || control().faulty ||
         is_writing_calls();
}

}  // namespace cann_sim

using namespace cann_sim;

extern "C" {

void cann_sim_start_log() {
  const std::lock_guard lock(control().mutex);
  control().log.clear();
  control().logging = true;
}
// The log as a JSON array; logging ends.
const char* cann_sim_take_log() {
  static thread_local std::string text;
  const std::lock_guard lock(control().mutex);
  control().logging = false;
  text = Json::array(control().log).text();
  control().log.clear();
  return text.c_str();
}
const char* cann_sim_live_handles() {
  static thread_local std::string text;
  text = Json::object({{"aclTensor", aclTensor::live()},
                       {"aclTensorList", aclTensorList::live()},
                       {"aclIntArray", aclIntArray::live()},
                       {"aclScalar", aclScalar::live()},
                       {"aclOpExecutor", aclOpExecutor::live()},
                       {"HugeMemory", HugeMemory::live()}})
             .text();
  return text.c_str();
}
void cann_sim_fail(const char* function, int phase, int status, const char* message, int times,
                   int after) {
  const std::lock_guard lock(control().mutex);
  control().faulty = true;
  control().faults.push_back({function, phase, status, message, times, after});
}
void cann_sim_no_faults() {
  const std::lock_guard lock(control().mutex);
  control().faulty = false;
  control().faults.clear();
}
// Null pointers end it.
void cann_sim_alter(double (*number)(const char*, const char*, double),
                    void (*tensor)(const char*, const char*, DLManagedTensor*)) {
  const std::lock_guard lock(control().mutex);
  control().alteration = {number, tensor};
}
// A null pointer ends it.
void cann_sim_listen(void (*in_first_phase)(const char*)) {
  control().in_first_phase = in_first_phase;
}
void cann_sim_set_computing(bool on) { control().computing = on; }
}  // extern "C"
