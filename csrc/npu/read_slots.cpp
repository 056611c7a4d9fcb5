#include "npu/read_slots.h"

#include <ATen/ceil_div.h>

#include <algorithm>
#include <string>

#include "core/error.h"
#include "core/tensor_checks.h"
#include "npu/aclnn/product.h"

namespace ascend_attn::aclnn {
namespace {

// The slots of a token that are read.
struct Row {
  const int32_t* slots;
  int64_t count;
  int64_t visible;  // keys
  std::string token;

  int64_t find(int32_t index) const { return std::find(slots, slots + count, index) - slots; }
  std::string place(int64_t slot) const { return c10::str("(", token, ", 0, ", slot, ")"); }
};

template <typename Check>
void for_each_row(const Selection& selection, const Check& check) {
  const auto indices = on_host(selection.sparse_indices).contiguous();
  const auto* rows = indices.const_data_ptr<int32_t>();
  const int64_t slots = indices.size(-1);
  for (const auto& sequence : selection.sequences) {
    const auto visible = visible_keys(selection.mode, sequence.queries, sequence.keys);
    for (int64_t token = 0; token < sequence.queries; ++token) {
      const int64_t at = sequence.query_begin + token;
      const int64_t keys = visible.end(token);
      check(Row{rows + at * slots, std::min(slots, at::ceil_div(keys, selection.block_size)), keys,
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

void check_order(const Selection& selection) {
  if (!runs_on(kA2A3)) {
    return;
  }
  for_each_row(selection, [&](const Row& row) {
    const int64_t end = row.find(-1);
    if (selection.block_size >= kWholeBlocks) {
      check_value(end > 0 || row.count == 0, selection.op, "sparse_indices",
                  "expected a block in each row that sees keys, since the NPU's kernel gives "
                  "infinity without one, got -1 at ",
                  row.place(0));
      return;
    }
    const auto* behind = std::find_if(row.slots + end, row.slots + row.count,
                                      [](int32_t index) { return index != -1; });
    const int64_t slot = behind - row.slots;
    check_value(slot == row.count, selection.op, "sparse_indices",
                "expected nothing behind the first -1 of a row, which does not end it on the NPU, "
                "got ",
                slot == row.count ? -1 : *behind, " at ", row.place(slot));
  });
}

void check_incomplete_block(const Selection& selection) {
  if (!runs_on(kA2A3) || selection.block_size == 1) {
    return;
  }
  for_each_row(selection, [&](const Row& row) {
    if (row.visible % selection.block_size == 0) {
      return;
    }
    const int64_t block = row.visible / selection.block_size;
    const int64_t slot = row.find(static_cast<int32_t>(block));
    const int64_t last = row.find(-1) - 1;
    check_value(slot >= last, selection.op, "sparse_indices", "expected block ", block,
                ", of which the token sees a part, in the last slot of its row that is read, since "
                "the NPU's kernel computes other orders wrong, got it at ",
                row.place(slot));
  });
}

}  // namespace ascend_attn::aclnn
