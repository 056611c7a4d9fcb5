#include <algorithm>
#include <cstdlib>
#include <ranges>

#include "opapi/core/opapi.h"

bool cann_sim::is_missing(std::string_view function) {
  const char* names = std::getenv("CANN_SIM_WITHOUT");  // with commas between them
  return names &&
         std::ranges::any_of(std::string_view(names) | std::views::split(','),
                             [&](const auto& name) { return std::ranges::equal(name, function); });
}
