#include <cstdlib>
#include <string>

#include "opapi/core/opapi.h"

bool cann_sim::is_missing(std::string_view function) {
  const char* names = std::getenv("CANN_SIM_WITHOUT");  // with commas between them
  const auto quoted = ',' + std::string(function) + ',';
  return names && (',' + std::string(names) + ',').find(quoted) != std::string::npos;
}
