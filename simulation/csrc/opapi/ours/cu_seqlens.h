// Cumulative lengths with a leading 0, as the functions for compressed keys take them.
#pragma once

#include <ATen/ops/zeros.h>

#include <string_view>

#include "opapi/core/opapi.h"

namespace cann_sim {

// Adds the operator's cumulative lengths, without the 0. In other layouts than TND a function takes
// none; it refuses a list that does not begin with 0.
inline void add_ends(const Call& call, std::string_view name, std::string_view schema,
                     OperatorArguments& arguments) {
  if (const auto given = call.optional_tensor(name)) {
    TORCH_CHECK(given->numel() > 0 && given->select(0, 0).item<int64_t>() == 0, name,
                " has no leading 0");
    arguments[std::string(schema)] = given->narrow(0, 1, given->size(0) - 1);
  }
}

// Where a causal call has no residual, the kernel reads 0: adds that for every batch.
inline void add_residual(const Call& call, std::string_view lengths, OperatorArguments& arguments) {
  if (call.find<TensorView>("cmpResidualKOptional") || call.get<int64_t>("maskMode") != 3) {
    return;
  }
  const auto query = call.tensor("q");
  const auto batch = call.is_tnd("layoutQ") ? call.tensor(lengths).size(0) - 1 : query.size(0);
  arguments["cmp_residual_key"] = at::zeros({batch}, query.options().dtype(at::kInt));
}

// Raises unless exactly the layout TND has cumulative lengths.
inline void check_packed(const Call& call, std::string_view layout, std::string_view name) {
  TORCH_CHECK(call.is_tnd(layout) == (call.find<TensorView>(name) != nullptr), name,
              call.is_tnd(layout) ? " is missing in layout TND" : " is given outside layout TND");
}

}  // namespace cann_sim
