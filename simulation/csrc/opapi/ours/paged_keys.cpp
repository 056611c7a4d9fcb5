#include "opapi/ours/paged_keys.h"

#include <ATen/ops/zeros.h>

#include <numeric>

namespace cann_sim {

OperatorArguments PagedKeys::in_layout_of_query(const Call& call) const {
  const auto& key_layout = call.get<std::string>(layout);
  if (key_layout != paged) {
    TORCH_CHECK(key_layout == call.get<std::string>(query_layout), layout, " ", key_layout,
                " differs from ", query_layout);
    return {};
  }
  for (const auto name : {std::string_view("blockTableOptional"), lengths}) {
    TORCH_CHECK(call.find<TensorView>(name), layout, " ", paged, " without ", name);
  }
  const auto table = call.tensor("blockTableOptional");
  // With paged keys the lengths are counts, not cumulative, even if the queries are TND.
  const auto sizes = call.elements(lengths);
  const bool packed = call.is_tnd(query_layout);
  OperatorArguments arguments;
  for (const auto& [name, schema] : caches) {
    const auto cache = call.optional_tensor(name);
    if (!cache) {
      continue;
    }
    const auto batches = static_cast<int64_t>(sizes.size());
    const auto block_size = cache->size(1);
    auto shape = cache->sizes().slice(1).vec();
    shape[0] = packed ? std::accumulate(sizes.begin(), sizes.end(), int64_t{0})
                      : table.size(1) * block_size;
    if (!packed) {
      shape.insert(shape.begin(), batches);
    }
    const auto keys = at::zeros(shape, cache->options());
    int64_t begin = 0;
    for (int64_t batch = 0; batch < batches; ++batch) {
      const auto used = table[batch].narrow(0, 0, (sizes[batch] + block_size - 1) / block_size);
      const auto to =
          packed ? keys.narrow(0, begin, sizes[batch]) : keys[batch].narrow(0, 0, sizes[batch]);
      to.copy_(cache->index_select(0, used).flatten(0, 1).narrow(0, 0, sizes[batch]));
      begin += sizes[batch];
    }
    arguments[schema] = keys;
  }
  if (packed) {
    arguments["actual_seq_lengths_key"] = call.tensor(lengths).cumsum(0, at::kInt);
  }
  return arguments;
}

}  // namespace cann_sim
