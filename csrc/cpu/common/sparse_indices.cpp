#include "cpu/common/sparse_indices.h"

#include "core/error.h"
#include "cpu/common/token_rows.h"
#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {
namespace {

bool all_in_range(const int32_t* indices, int64_t count, int64_t blocks) {
  int32_t lowest = -1;
  int32_t highest = -1;
  vectorized([&lowest, &highest, indices, count] {
    int32_t low = -1;
    int32_t high = -1;
    for (int64_t i = 0; i < count; ++i) {
      low = std::min(low, indices[i]);
      high = std::max(high, indices[i]);
    }
    lowest = low;
    highest = high;
  });
  return lowest >= -1 && highest < blocks;
}

}  // namespace

void check_sparse_indices(std::string_view op, Layout layout, const at::Tensor& sparse_indices,
                          int64_t capacity, const std::vector<Sequence>& sequences,
                          Selectable selectable, int64_t block_size) {
  const auto indices = with_dense_rows(sparse_indices);
  const int64_t count = indices.size(-1);
  const bool bsnd = layout == Layout::BSND;
  const bool whole_batch = bsnd && selectable == Selectable::all_keys;
  for (const auto& sequence : sequences) {
    const int64_t keys = whole_batch ? capacity : sequence.keys;
    const int64_t blocks = blocks_of(keys, block_size);
    const int64_t tokens = whole_batch ? indices.size(1) : sequence.queries;
    const TokenRows<int32_t> rows(indices, sequence.query_begin);
    for (int64_t token = 0; token < tokens; ++token) {
      const int32_t* row = rows.row(token);
      if (all_in_range(row, count, blocks)) [[likely]] {
        continue;
      }
      const auto* wrong = std::find_if(
          row, row + count, [blocks](int32_t index) { return index < -1 || index >= blocks; });
      const auto place =
          bsnd ? c10::str("(", sequence.query_begin / indices.size(1), ", ", token, ", 0, ",
                          wrong - row, ")")
               : c10::str("(", sequence.query_begin + token, ", 0, ", wrong - row, ")");
      check_value(false, op, "sparse_indices", "expected values in [-1, ", blocks, "), got ",
                  *wrong, " at ", place);
    }
  }
}

}  // namespace ascend_attn::cpu
