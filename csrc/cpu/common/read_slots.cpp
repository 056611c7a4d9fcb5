#include "cpu/common/read_slots.h"

#include <algorithm>
#include <string>

#include "core/device_in_force.h"
#include "core/error.h"

namespace ascend_attn::cpu {
namespace {

// The slots that the kernel reads for one token.
struct Row {
  const int32_t* slots;
  int64_t count;
  std::string token;

  int64_t find(int32_t index) const { return std::find(slots, slots + count, index) - slots; }
  std::string place(int64_t slot) const { return c10::str("(", token, ", 0, ", slot, ")"); }
};

template <typename Check>
void for_each_row(const SparseInputs& inputs, const Check& check) {
  const auto& indices = inputs.sparse_indices;
  for (const auto& sequence : inputs.sequences) {
    const TokenRows<int32_t> rows(indices, sequence.query_begin);
    const auto visible = inputs.visible(sequence);
    for (int64_t token = 0; token < sequence.queries; ++token) {
      const int64_t at = sequence.query_begin + token;
      check(Row{rows.row(token),
                std::min(indices.size(-1), blocks_of(visible.end(token), inputs.block_size)),
                indices.dim() == 4 ? c10::str(at / indices.size(1), ", ", at % indices.size(1))
                                   : c10::str(at)});
    }
  }
}

}  // namespace

void check_no_gaps(std::string_view op, const SparseInputs& inputs) {
  for_each_row(inputs, [&](const Row& row) {
    const int64_t slot = row.find(-1);
    check_value(slot == row.count, op, "sparse_indices", "expected no -1 in the first ", row.count,
                " slots of a row, min(K, ", inputs.block_size == 1 ? "keys" : "blocks",
                " that the token sees), which the NPU's kernel reads, got -1 at ", row.place(slot),
                "; lightning_indexer fills these slots");
  });
}

void check_nothing_behind_gaps(std::string_view op, const SparseInputs& inputs) {
  const auto device = device_in_force();
  if (inputs.block_size > 1 || (device && !kA2A3.contain(*device))) {
    return;
  }
  for_each_row(inputs, [&](const Row& row) {
    const auto* behind = std::find_if(row.slots + row.find(-1), row.slots + row.count,
                                      [](int32_t index) { return index != -1; });
    const int64_t slot = behind - row.slots;
    check_value(slot == row.count, op, "sparse_indices",
                "expected nothing behind the first -1 of a row, which does not end it on the NPU, "
                "got ",
                slot == row.count ? -1 : *behind, " at ", row.place(slot));
  });
}

}  // namespace ascend_attn::cpu
