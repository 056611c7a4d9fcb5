// Tensor layouts, named by their axes: B batch, S sequence, N heads, D head size, H = N * D, T the
// packed tokens of all sequences. BNSD_BSND takes BNSD inputs and returns a BSND output. NTD and
// NBSD are a part of such pairs alone.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>

namespace ascend_attn {

enum class Layout { BSND, TND, BNSD, BSH, SBH, BNSD_BSND, NTD, NBSD };

// The position of each axis in a layout.
struct LayoutAxes {
  int64_t rank;
  int64_t batch;  // -1 in TND and NTD, which have none
  int64_t tokens;
  int64_t heads;  // the axis H in BSH and SBH

  // Whether heads and head size share the axis H.
  bool merged() const { return heads == 2 && rank == 3; }
  bool packed() const { return batch < 0; }
};

// The layouts that a LayoutArgument names.
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
    case Layout::NTD:
      return {.rank = 3, .batch = -1, .tokens = 1, .heads = 0};
    case Layout::NBSD:
      return {.rank = 4, .batch = 1, .tokens = 2, .heads = 0};
  }
  return {};
}

std::string_view layout_name(Layout layout);

// The `layout` argument of an operator, parsed when the operator's struct is constructed.
class LayoutArgument {
 public:
  LayoutArgument(std::string_view text);

  // The text as the caller passed it.
  std::string_view text() const { return text_; }
  operator std::string_view() const { return text_; }

  // Valid only after check_layout has accepted the argument.
  Layout value() const { return *layout_; }
  // None if no layout has this name.
  const std::optional<Layout>& parsed() const { return layout_; }
  bool operator==(Layout layout) const { return layout_ == layout; }

 private:
  std::string_view text_;
  std::optional<Layout> layout_;
};

// The argument `layout_key` or `layout_kv`: "PA_BSND", or that of the queries, which None stands
// for.
class KeyLayoutArgument {
 public:
  KeyLayoutArgument() = default;
  KeyLayoutArgument(std::optional<std::string_view> text) : text_(text) {}

  // As the caller passed it.
  const std::optional<std::string_view>& text() const { return text_; }
  operator std::optional<std::string_view>() const { return text_; }
  bool paged() const { return text_ == kPaged; }

  static constexpr std::string_view kPaged = "PA_BSND";

 private:
  std::optional<std::string_view> text_;
};

// Returns the layout; raises unless it is one of `allowed`.
Layout check_layout(std::string_view op, const LayoutArgument& layout,
                    std::initializer_list<Layout> allowed);

}  // namespace ascend_attn
