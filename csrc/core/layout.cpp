#include "core/layout.h"

#include <array>
#include <string>

#include "core/error.h"

namespace ascend_attn {

std::string_view layout_name(Layout layout) {
  constexpr std::array<std::string_view, 6> names{"BSND", "TND", "BNSD", "BSH", "SBH", "BNSD_BSND"};
  return names[static_cast<size_t>(layout)];
}

Layout parse_layout(std::string_view op, std::string_view name,
                    std::initializer_list<Layout> allowed) {
  std::string expected;
  for (const auto layout : allowed) {
    if (layout_name(layout) == name) {
      return layout;
    }
    expected += (expected.empty() ? "" : ", ") + std::string(layout_name(layout));
  }
  raise(Violation::value, op, "layout",
        c10::str("expected one of ", expected, ", got '", name, "'"));
}

}  // namespace ascend_attn
