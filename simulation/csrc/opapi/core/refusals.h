// The calls that CANN's compiled host code refuses, with the status that it returns.
#pragma once

#include <optional>
#include <string>

#include "opapi/core/opapi.h"

namespace cann_sim {

struct Refused {
  int status;
  std::string text;
};

// Asked before all other checks of the first phase.
std::optional<Refused> refused_by_host(const Function& function, const Call& call);

}  // namespace cann_sim
