#include "ops/lightning_indexer.h"

#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "core/sequence_lengths.h"
#include "cpu/common/key_selection.h"
#include "dispatch/operator.h"

namespace ascend_attn::cpu {
namespace {

void lightning_indexer(const LightningIndexer& op, LightningIndexer::Outputs& outputs) {
  const SparseInputs inputs(op);
  std::get<0>(outputs).fill_(-1);
  std::get<1>(outputs).fill_(-std::numeric_limits<double>::infinity());
  dispatch_operand(op.query.scalar_type(), [&]<typename Input, typename Operand>() {
    select_keys<Input, Operand>(inputs, HeadWeights<Input>(op.weights), {}, std::get<0>(outputs),
                                std::get<1>(outputs));
  });
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) { register_kernel<LightningIndexer, lightning_indexer>(m); }

}  // namespace
}  // namespace ascend_attn::cpu

void ascend_attn::LightningIndexer::check_values() const {
  const cpu::SparseInputs checked(*this);
  // A pack of several sequences with paged keys and without a query that has any: the NPU's kernel
  // writes behind its outputs. Keys side by side are launched so that it does not.
  if (compressed() || !pages.given() || layout != Layout::TND || checked.sequences.size() < 2) {
    return;
  }
  check_value(!std::ranges::all_of(checked.sequences, &Sequence::empty), name,
              "actual_seq_lengths_key",
              "expected a sequence that has queries and keys, without which the NPU's kernel "
              "writes out of bounds, got none among ",
              checked.sequences.size());
}
