#include "ops/sparse_flash_attention.h"

#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/common/partial_attention.h"
#include "cpu/common/read_slots.h"
#include "cpu/common/selected_attention.h"
#include "cpu/common/sparse_inputs.h"
#include "dispatch/operator.h"

namespace ascend_attn::cpu {
namespace {

template <typename Input, typename Operand>
void attend(const SparseInputs& inputs, double scale,
            const SparseFlashAttention::Outputs& outputs) {
  using T = Accumulator<Operand>;
  const auto sequences = inputs.by_sequence<Input>();
  using Rows = SequenceInputs<Input>;
  SelectingTokens<Rows> all_tokens(inputs.heads);
  for (const auto& sequence : sequences) {
    for (int64_t token = 0; token < sequence.sequence.queries; ++token) {
      const int64_t blocks = blocks_of(sequence.visible.end(token), inputs.block_size);
      all_tokens.add(sequence, token, std::min(sequence.count, blocks));
    }
  }
  auto tokens = std::move(all_tokens).divided();
  const int64_t heads = tokens.empty() ? 0 : tokens[0].heads;
  auto* out = std::get<0>(outputs).template mutable_data_ptr<Input>();
  const auto statistics_of = [](const at::Tensor& statistics, int64_t row) {
    return statistics.numel() > 0 ? statistics.mutable_data_ptr<T>() + row : nullptr;
  };
  using Worker = SelectedAttention<Rows, Operand>;
  attend_to_parts<T>(
      std::move(tokens), {Worker::padded_heads(heads), inputs.size},
      [&] { return std::make_unique<Worker>(inputs, heads, scale); },
      [&](const SelectingToken<Rows>& token, const Partial<T>& result, int64_t begin, int64_t end) {
        const int64_t row = token.first_row;
        const TokenOutputs<Input, T> to{out + row * inputs.size,
                                        statistics_of(std::get<1>(outputs), row),
                                        statistics_of(std::get<2>(outputs), row)};
        to.store(result, begin, end, inputs.size);
      });
}

void sparse_flash_attention(const SparseFlashAttention& op,
                            SparseFlashAttention::Outputs& outputs) {
  const SparseInputs inputs(op, Selectable::all_keys);
  const auto& [out, softmax_max, softmax_sum] = outputs;
  inputs.zero_unused({out, softmax_max, softmax_sum});
  dispatch_operand(out.scalar_type(), [&]<typename Input, typename Operand>() {
    attend<Input, Operand>(inputs, op.options.scale_value, outputs);
  });
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<SparseFlashAttention, sparse_flash_attention>(m);
}

}  // namespace
}  // namespace ascend_attn::cpu

void ascend_attn::SparseFlashAttention::check_values() const {
  cpu::check_nothing_behind_gaps(name, cpu::SparseInputs(*this, cpu::Selectable::all_keys));
}
