// The axis order of tensors. B batch, S sequence, N heads, D head size, H = N * D, T all tokens of
// all sequences, packed. BNSD_BSND: BNSD, and BSND of the output.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>

namespace ascend_attn {

enum class Layout { BSND, TND, BNSD, BSH, SBH, BNSD_BSND };

// Where a layout has its axes.
struct LayoutAxes {
  int64_t rank;
  int64_t batch;  // -1 in TND, which has none
  int64_t tokens;
  int64_t heads;  // the axis H in BSH and SBH

  // Whether heads and head size share the axis H.
  bool merged() const { return heads == 2 && rank == 3; }
  bool packed() const { return batch < 0; }
};

inline constexpr std::array kLayouts{Layout::BSND, Layout::TND, Layout::BNSD,
                                     Layout::BSH,  Layout::SBH, Layout::BNSD_BSND};

constexpr LayoutAxes axes_of(Layout layout) {
  switch (layout) {
    case Layout::BSND:
      return {.rank = 4, .batch = 0, .tokens = 1, .heads = 2};
    case Layout::TND:
      return {.rank = 3, .batch = -1, .tokens = 0, .heads = 1};
    case Layout::BNSD:
    case Layout::BNSD_BSND:
      return {.rank = 4, .batch = 0, .tokens = 2, .heads = 1};
    case Layout::BSH:
      return {.rank = 3, .batch = 0, .tokens = 1, .heads = 2};
    case Layout::SBH:
      return {.rank = 3, .batch = 1, .tokens = 0, .heads = 2};
  }
  return {};
}

std::string_view layout_name(Layout layout);

// The argument `layout` of an operator, parsed when the operator's struct is made.
class LayoutArgument {
 public:
  LayoutArgument(std::string_view text);

  // The text as it was given.
  std::string_view text() const { return text_; }
  operator std::string_view() const { return text_; }

  // A layout, once check_layout has accepted it.
  Layout value() const { return *layout_; }
  bool operator==(Layout layout) const { return layout_ == layout; }

 private:
  std::string_view text_;
  std::optional<Layout> layout_;
};

// Raises unless the layout is one of `allowed`.
Layout check_layout(std::string_view op, const LayoutArgument& layout,
                    std::initializer_list<Layout> allowed);

}  // namespace ascend_attn
