#include "opapi_paged_keys.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/pad_sequence.h>

#include <algorithm>

namespace cann_sim {

OperatorArguments PagedKeys::in_layout_of_query(const Call& call) const {
  const auto& key_layout = call.get<std::string>(layout);
  if (key_layout != "PA_BSND") {
    TORCH_CHECK(key_layout == call.get<std::string>(query_layout), layout, " ", key_layout,
                " differs from ", query_layout);
    return {};
  }
  for (const auto name : {std::string_view("blockTableOptional"), lengths}) {
    TORCH_CHECK(call.find<TensorView>(name), layout, " PA_BSND without ", name);
  }
  const auto table = call.tensor("blockTableOptional");
  // Not the ends, whatever the layout of the queries is.
  const auto sizes = call.elements(lengths);
  const bool packed = call.is_tnd(query_layout);
  OperatorArguments arguments;
  for (const auto& [name, schema] : caches) {
    const auto cache = call.optional_tensor(name);
    if (!cache) {
      continue;
    }
    std::vector<at::Tensor> sequences;
    for (size_t batch = 0; batch < sizes.size(); ++batch) {
      const auto blocks = (sizes[batch] + cache->size(1) - 1) / cache->size(1);
      const auto used = table[static_cast<int64_t>(batch)].narrow(0, 0, blocks);
      sequences.push_back(cache->index_select(0, used).flatten(0, 1).narrow(0, 0, sizes[batch]));
    }
    arguments[schema] = packed ? at::cat(sequences) : at::pad_sequence(sequences, true);
  }
  if (packed) {
    arguments["actual_seq_lengths_key"] = call.tensor(lengths).cumsum(0, at::kInt);
  }
  return arguments;
}

}  // namespace cann_sim
