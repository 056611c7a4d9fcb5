// The product of this process's NPU.
#pragma once

#include <optional>
#include <string>

#include "core/limits.h"

namespace ascend_attn {

// Returns the name that aclrtGetSocName gives, such as "Ascend910B2".
std::string soc_name();

// Returns nullopt for a SoC of none of the products.
std::optional<Product> product_of_soc(std::string_view soc);

}  // namespace ascend_attn
