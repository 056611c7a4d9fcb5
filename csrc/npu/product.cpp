#include "npu/product.h"

#include <acl/acl.h>

#include <array>
#include <utility>

namespace ascend_attn {

std::string soc_name() {
  const char* name = aclrtGetSocName();
  return name ? name : "";
}

std::optional<Product> product_of_soc(std::string_view soc) {
  constexpr std::array<std::pair<std::string_view, Product>, 4> kProducts{{
      {"Ascend910B", Product::A2},
      {"Ascend910_93", Product::A3},
      {"Ascend950", Product::P950},
      {"Ascend310P", Product::P310},
  }};
  for (const auto& [prefix, product] : kProducts) {
    if (soc.starts_with(prefix)) {
      return product;
    }
  }
  return std::nullopt;
}

}  // namespace ascend_attn
