#include "npu/absent_ropes.h"

#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ascend_attn::aclnn {
namespace {

constexpr int64_t kRopeSize = 64;

std::vector<int64_t> rope_sizes(const at::Tensor& beside) {
  auto sizes = beside.sizes().vec();
  sizes.back() = kRopeSize;
  return sizes;
}

}  // namespace

Ropes ropes_or_zeros(const at::Tensor& query, const at::Tensor& key,
                     const std::optional<at::Tensor>& query_rope,
                     const std::optional<at::Tensor>& key_rope) {
  if (query_rope) {
    return {*query_rope, *key_rope};
  }
  const auto query_sizes = rope_sizes(query);
  const auto key_sizes = rope_sizes(key);
  const int64_t query_count = c10::multiply_integers(query_sizes);
  const int64_t key_count = c10::multiply_integers(key_sizes);
  const auto zeros = at::zeros({std::max(query_count, key_count)}, query.options());
  return {zeros.narrow(0, 0, query_count).view(query_sizes),
          zeros.narrow(0, 0, key_count).view(key_sizes)};
}

}  // namespace ascend_attn::aclnn
