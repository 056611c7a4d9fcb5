#include "ascendcl/report.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>

#include "ascendcl/json.h"

namespace cann_sim {
namespace {

const char* setting(const char* name) {
  const char* value = std::getenv(name);
  return value && *value ? value : nullptr;
}

const bool counting = setting("CANN_SIM_REPORT") != nullptr;

// Outlives every static object of the libraries that still run something at exit.
struct Counts {
  std::mutex mutex;
  std::array<std::map<std::string, int64_t, std::less<>>, 3> by_outcome;
};
Counts& counts() {
  static auto* instance = new Counts;
  return *instance;
}

int file_of_calls() {
  static const int file = [] {
    const char* path = setting("CANN_SIM_CALLS");
    const int opened = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666) : -1;
    if (path && opened < 0) {
      std::perror(path);
    }
    return opened;
  }();
  return file;
}

}  // namespace

void count(Outcome outcome, std::string_view name) {
  if (!counting) {
    return;
  }
  const std::lock_guard lock(counts().mutex);
  auto& names = counts().by_outcome[static_cast<size_t>(outcome)];
  const auto found = names.find(name);
  ++(found == names.end() ? names.emplace(name, 0).first : found)->second;
}

bool is_writing_calls() { return file_of_calls() >= 0; }

// Several processes may have the file open: a line is one piece.
void write_call(const std::string& json) {
  const auto line = json + "\n";
  if (write(file_of_calls(), line.data(), line.size()) < 0) {
    std::perror("CANN_SIM_CALLS");
  }
}

}  // namespace cann_sim

// The counts so far, as JSON.
extern "C" const char* cann_sim_counts() {
  static thread_local std::string text;
  constexpr std::array kOutcomes{"aclnn", "cpu", "refused"};
  auto& all = cann_sim::counts();
  const std::lock_guard lock(all.mutex);
  auto json = cann_sim::Json::object({});
  for (size_t i = 0; i < kOutcomes.size(); ++i) {
    auto names = cann_sim::Json::object({});
    for (const auto& [name, times] : all.by_outcome[i]) {
      names.add(name, times);
    }
    json.add(kOutcomes[i], names);
  }
  text = json.text();
  return text.c_str();
}
