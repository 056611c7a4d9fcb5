// Which product the NPU of this process is.
#pragma once

#include <optional>
#include <string>

#include "core/limits.h"

namespace ascend_attn {

// As aclrtGetSocName says it: "Ascend910B2".
std::string soc_name();

// Nothing for a SoC that none of the products has.
std::optional<Product> product_of_soc(std::string_view soc);

}  // namespace ascend_attn
