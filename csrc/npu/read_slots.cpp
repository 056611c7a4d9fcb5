#include "npu/read_slots.h"

#include <ATen/ceil_div.h>

#include <algorithm>

#include "core/error.h"
#include "core/tensor_checks.h"

namespace ascend_attn::aclnn {

void check_read_slots(const char* op, SparseMode mode, int64_t block_size,
                      const std::vector<Sequence>& sequences, const at::Tensor& sparse_indices) {
  const auto indices = on_host(sparse_indices).contiguous();
  const auto* rows = indices.const_data_ptr<int32_t>();
  const int64_t count = indices.size(-1);
  for (const auto& sequence : sequences) {
    const auto visible = visible_keys(mode, sequence.queries, sequence.keys);
    for (int64_t token = 0; token < sequence.queries; ++token) {
      const int64_t at = sequence.query_begin + token;
      const auto* row = rows + at * count;
      const int64_t read = std::min(count, at::ceil_div(visible.end(token), block_size));
      const int64_t slot = std::find(row, row + read, -1) - row;
      if (slot == read) [[likely]] {
        continue;
      }
      const auto place = indices.dim() == 4
                             ? c10::str(at / indices.size(1), ", ", at % indices.size(1))
                             : c10::str(at);
      check_value(false, op, "sparse_indices", "expected no -1 in the first ", read,
                  " slots of a row, min(K, ", block_size == 1 ? "keys" : "blocks",
                  " that the token sees), which the NPU's kernel reads, got -1 at (", place,
                  ", 0, ", slot, "); lightning_indexer fills these slots");
    }
  }
}

}  // namespace ascend_attn::aclnn
