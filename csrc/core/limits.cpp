#include "core/limits.h"

#include <algorithm>
#include <string>

namespace ascend_attn {

bool Allowed::contains(int64_t value) const {
  for (const auto listed : one_of) {
    if (value == listed) {
      return true;
    }
  }
  return (value >= min && value <= max && value % multiple_of == 0) ||
         (or_multiple_of != 0 && value > 0 && value % or_multiple_of == 0);
}

std::string Allowed::text() const {
  std::string list;
  for (const auto listed : one_of) {
    list += (list.empty() ? "" : ", ") + std::to_string(listed);
  }
  if (min > max) {
    return one_of.size() == 1 ? list : "one of " + list;
  }
  const auto range = c10::str(min, "..", max);
  const auto multiples =
      (multiple_of == 1 ? range : c10::str("a multiple of ", multiple_of, " in ", range)) +
      (or_multiple_of == 0 ? "" : c10::str(" or a multiple of ", or_multiple_of));
  return list.empty() ? multiples : multiples + " or one of " + list;
}

const Dtypes* OperatorLimits::dtypes_on(Device device) const {
  const auto found = std::ranges::find_if(
      dtypes, [device](const Dtypes& entry) { return entry.devices.contain(device); });
  return found == dtypes.end() ? nullptr : &*found;
}

const Limit* OperatorLimits::find(std::string_view quantity, Device device) const {
  const auto found = std::ranges::find_if(limits, [&](const Limit& limit) {
    return limit.quantity == quantity && limit.devices.contain(device);
  });
  return found == limits.end() ? nullptr : &*found;
}

}  // namespace ascend_attn
