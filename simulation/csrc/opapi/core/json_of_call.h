// The arguments of a call as JSON, for the log that tests read.
#pragma once

#include <vector>

#include "ascendcl/json.h"
#include "opapi/core/opapi.h"

namespace cann_sim {

Json json_of(const Function& function, const std::vector<Value>& values);

}  // namespace cann_sim
