// Faults of kernels that CANN does not notice, and which of them are looked for.
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include "ascendcl/runtime.h"
#include "opapi/core/opapi.h"

namespace cann_sim {
namespace {

unsigned named_harms(std::string_view names) {
  const auto named = [&](std::string_view name, Harm harm) {
    return names.find(name) == std::string_view::npos ? 0U : static_cast<unsigned>(harm);
  };
  return named("bounds", Harm::bounds) | named("hang", Harm::hang) |
         named("results", Harm::results);
}

std::atomic<unsigned>& unchecked() {
  static std::atomic<unsigned> harms = [] {
    const char* names = std::getenv("CANN_SIM_UNCHECKED");
    return names ? named_harms(names) : 0U;
  }();
  return harms;
}

}  // namespace

bool has_faults(Harm harm) {
  const bool executed = product() == Product::a2 || product() == Product::a3;
  return executed && (unchecked() & static_cast<unsigned>(harm)) == 0;
}

void check_faults(const Call& call, const std::vector<KernelFault>& faults) {
  for (const auto& fault : faults) {
    if (has_faults(fault.harm)) {
      if (const auto text = fault.find(call); !text.empty()) {
        throw std::runtime_error(text);
      }
    }
  }
}

}  // namespace cann_sim

extern "C" {

// Names of harms that are not looked for from now on; those of before are returned as bits, which
// `cann_sim_restore_unchecked` takes.
unsigned cann_sim_set_unchecked(const char* names) {
  return cann_sim::unchecked().exchange(cann_sim::named_harms(names));
}
void cann_sim_restore_unchecked(unsigned harms) { cann_sim::unchecked() = harms; }

}  // extern "C"
