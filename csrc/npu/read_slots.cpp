#include "npu/read_slots.h"

#include <ATen/ceil_div.h>

#include <algorithm>
#include <string>

#include "core/error.h"
#include "core/tensor_checks.h"
#include "npu/aclnn/product.h"

namespace ascend_attn::aclnn {
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
void for_each_row(const Selection& selection, const Check& check) {
  const auto indices = on_host(selection.sparse_indices).contiguous();
  const auto* rows = indices.const_data_ptr<int32_t>();
  const int64_t slots = indices.size(-1);
  for (size_t b = 0; b < selection.sequences.size(); ++b) {
    const auto& sequence = selection.sequences[b];
    const auto visible =
        selection.residuals.empty()
            ? visible_keys(selection.mode, sequence.queries, sequence.keys)
            : visible_compressed_keys(selection.mode, sequence.queries, sequence.keys,
                                      selection.ratio, selection.residuals[b]);
    for (int64_t token = 0; token < sequence.queries; ++token) {
      const int64_t at = sequence.query_begin + token;
      const int64_t keys = visible.end(token);
      check(Row{rows + at * slots, std::min(slots, at::ceil_div(keys, selection.block_size)),
                indices.dim() == 4 ? c10::str(at / indices.size(1), ", ", at % indices.size(1))
                                   : c10::str(at)});
    }
  }
}

}  // namespace

void check_no_gaps(const Selection& selection) {
  for_each_row(selection, [&](const Row& row) {
    const int64_t slot = row.find(-1);
    check_value(slot == row.count, selection.op, "sparse_indices", "expected no -1 in the first ",
                row.count, " slots of a row, min(K, ",
                selection.block_size == 1 ? "keys" : "blocks",
                " that the token sees), which the NPU's kernel reads, got -1 at ", row.place(slot),
                "; lightning_indexer fills these slots");
  });
}

void check_nothing_behind_gaps(const Selection& selection) {
  if (!runs_on(kA2A3) || selection.block_size > 1) {
    return;
  }
  for_each_row(selection, [&](const Row& row) {
    const auto* behind = std::find_if(row.slots + row.find(-1), row.slots + row.count,
                                      [](int32_t index) { return index != -1; });
    const int64_t slot = behind - row.slots;
    check_value(slot == row.count, selection.op, "sparse_indices",
                "expected nothing behind the first -1 of a row, which does not end it on the NPU, "
                "got ",
                slot == row.count ? -1 : *behind, " at ", row.place(slot));
  });
}

}  // namespace ascend_attn::aclnn
