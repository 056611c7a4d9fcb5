#include "ops/dense_defaults.h"

#include <cmath>
#include <cstdint>

#include "core/error.h"

namespace ascend_attn {
namespace {

double default_scale(LayoutAxes axes, const at::Tensor& query,
                     const std::optional<at::Tensor>& query_rope, const c10::SymInt& num_heads) {
  auto size = query.sym_size(-1);
  if (query_rope && query_rope->dim() == axes.rank) {
    size = size + query_rope->sym_size(-1);
  }
  const auto known = size.maybe_as_int();
  const auto heads = axes.merged() ? num_heads.maybe_as_int().value_or(0) : 1;
  // A call without a size of heads is refused or, if it is symbolic, not computed here.
  const int64_t of_head = known && heads > 0 ? *known / heads : 1;
  return std::pow(static_cast<double>(of_head > 0 ? of_head : 1), -0.5);
}

}  // namespace

void add_dense_defaults(std::string_view op, std::optional<Layout> layout, const at::Tensor& query,
                        const std::optional<at::Tensor>& query_rope,
                        std::optional<c10::SymInt>& num_heads, std::optional<double>& scale_value) {
  const auto axes = axes_of(layout.value_or(Layout::BSND));
  const bool fits = layout && query.dim() == axes.rank;
  if (!num_heads) {
    check_present(
        !fits || !axes.merged(), op, "num_heads",
        "expected the number of query heads, which query's shape does not tell in layout ",
        layout_name(layout.value_or(Layout::BSH)), ", got None");
    num_heads = fits ? query.sym_size(axes.heads) : c10::SymInt(1);
  }
  if (!scale_value) {
    scale_value = fits ? default_scale(axes, query, query_rope, *num_heads) : 1.0;
  }
}

}  // namespace ascend_attn
