// A user's view of a run: the counts of --report and the calls of --calls.
#pragma once

#include <string>
#include <string_view>

namespace cann_sim {

// An operator as an aclnn function or on the CPU, or what a function refused and why.
enum class Outcome { aclnn, cpu, refused };

// Does nothing without --report.
void count(Outcome outcome, std::string_view name);

// Whether there is a file for them.
bool is_writing_calls();
void write_call(const std::string& json);

}  // namespace cann_sim
