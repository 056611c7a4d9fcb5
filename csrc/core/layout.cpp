#include "core/layout.h"

#include <algorithm>
#include <string>

#include "core/error.h"

namespace ascend_attn {

std::string_view layout_name(Layout layout) {
  switch (layout) {
    case Layout::BSND:
      return "BSND";
    case Layout::TND:
      return "TND";
    case Layout::BNSD:
      return "BNSD";
    case Layout::BSH:
      return "BSH";
    case Layout::SBH:
      return "SBH";
    case Layout::BNSD_BSND:
      return "BNSD_BSND";
    case Layout::NTD:
      return "NTD";
    case Layout::NBSD:
      return "NBSD";
  }
  return "unknown";
}

LayoutArgument::LayoutArgument(std::string_view text) : text_(text) {
  const auto* found = std::ranges::find(kLayouts, text, layout_name);
  if (found != kLayouts.end()) {
    layout_ = *found;
  }
}

Layout check_layout(std::string_view op, const LayoutArgument& layout,
                    std::initializer_list<Layout> allowed) {
  std::string expected;
  for (const auto each : allowed) {
    if (layout == each) {
      return each;
    }
    expected += (expected.empty() ? "" : ", ") + std::string(layout_name(each));
  }
  raise(Violation::value, op, "layout",
        c10::str("expected one of ", expected, ", got ", quoted(layout.text())));
}

}  // namespace ascend_attn
