// Keys in a cache of blocks, for the operators that this library has for dense keys alone.
#pragma once

#include <utility>
#include <vector>

#include "opapi/core/opapi.h"

namespace cann_sim {

// The names that a function has for what belongs to its keys.
struct PagedKeys {
  // With the names of the operator.
  std::vector<std::pair<std::string_view, std::string>> caches;
  std::string_view lengths;
  std::string_view query_layout;
  std::string_view layout;
  std::string_view paged = "PA_BSND";  // the layout of such keys

  // Returns the operator's arguments in place of the caches, (blocks, block size, N, D): the keys
  // in the layout of the queries. Empty without blocks.
  OperatorArguments in_layout_of_query(const Call& call) const;
};

}  // namespace cann_sim
