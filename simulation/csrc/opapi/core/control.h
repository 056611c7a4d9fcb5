// Changes of calls by tests, and what tests hear of them; the other side is
// cann_simulator/control.py.
#pragma once

#include <ATen/DLConvertor.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "opapi/core/opapi.h"

namespace cann_sim {

struct Fault {
  std::string function;  // "" is every function
  // 0: the first phase asks for too much workspace; 3: the kernel fails, which a wait reports; -1:
  // a maker of handles gives none.
  int phase;
  int status;
  std::string message;
  int remaining;
  int before;  // that many calls are as usual
};

// Changes that a test makes: to numbers before a kernel runs, and to tensors behind it.
struct Alteration {
  double (*number)(const char* function, const char* argument, double value) = nullptr;
  void (*tensor)(const char* function, const char* argument, DLManagedTensor*) = nullptr;
};

// The fault that a test planted for this call, counted down.
std::unique_ptr<Fault> take_fault(std::string_view function, int phase);

Alteration alteration_of_test();
void alter_numbers(const Function& function, std::vector<Value>& values, const Alteration& by);
void alter_tensors(const Function& function, const std::vector<Value>& values,
                   const Alteration& by);

// Calls what a test wants to be called in a first phase.
void call_listener(const char* function);

bool is_logging();
void append_to_log(Json entry);
// Appends to the log what `entry` makes, while a test listens.
template <typename Entry>
void log(const Entry& entry) {
  if (is_logging()) {
    append_to_log(entry());
  }
}

}  // namespace cann_sim
