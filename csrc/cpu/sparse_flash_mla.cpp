// Online softmax over tiles of the window's keys and of the compressed ones. The sink joins at the
// end of a row.
#include "ops/sparse_flash_mla.h"

#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/common/mla_inputs.h"
#include "cpu/common/partial_attention.h"
#include "cpu/common/selected_attention.h"
#include "dispatch/operator.h"

namespace ascend_attn::cpu {
namespace {

// The outputs of one token: out (heads, D), and unless it is null softmax_lse (heads).
template <typename Input, typename T>
struct MlaOutputs {
  Input* out;
  T* softmax_lse;
  const T* sink;  // null if absent

  void store(const Partial<T>& from, int64_t begin, int64_t end, int64_t size) const {
    for (int64_t h = begin; h < end; ++h) {
      T lse = 0;
      if (from.keys > 0) {
        lse = store_head(from, h, size);
      } else {
        std::fill_n(out + h * size, size, Input(0));
      }
      if (softmax_lse) {
        softmax_lse[h] = lse;
      }
    }
  }

 private:
  T store_head(const Partial<T>& from, int64_t h, int64_t size) const {
    const T sum = from.sum[h];
    // Minus infinity is no sink.
    if (sink && !(sink[h] < std::numeric_limits<T>::lowest())) {
      // A sum of 0 has no maximum: every score is -inf.
      const T max = sum == 0 ? sink[h] : std::max(from.max[h], sink[h]);
      const T factor = softmax_weight(from.max[h], max);
      const T total = factor * sum + softmax_weight(sink[h], max);
      scale(from.out + h * size, factor / total, out + h * size, size);
      return max + std::log(total);
    }
    const bool none = sum == 0;
    scale(from.out + h * size, T(1) / (none ? std::numeric_limits<T>::quiet_NaN() : sum),
          out + h * size, size);
    return none ? -std::numeric_limits<T>::infinity() : from.max[h] + std::log(sum);
  }
};

template <typename Input, typename Operand>
void attend(const MlaInputs& inputs, double scale, const SparseFlashMla::Outputs& outputs) {
  using T = Accumulator<Operand>;
  using Rows = MlaRows<Input>;
  using Worker = SelectedAttention<Rows, Operand>;
  const auto sequences = inputs.by_sequence<Input>();
  SelectingTokens<Rows> all_tokens(inputs.heads);
  for (const auto& sequence : sequences) {
    for (int64_t token = 0; token < sequence.sequence.originals.queries; ++token) {
      all_tokens.add(sequence, token, sequence.selected(token).size());
    }
  }
  auto tokens = std::move(all_tokens).divided();
  const int64_t heads = tokens.empty() ? 0 : tokens[0].heads;
  const auto& [out, softmax_lse] = outputs;
  auto* to = out.template mutable_data_ptr<Input>();
  auto* lse = softmax_lse.numel() > 0 ? softmax_lse.template mutable_data_ptr<T>() : nullptr;
  const auto* sink = inputs.sink.defined() ? inputs.sink.template const_data_ptr<T>() : nullptr;
  attend_to_parts<T>(
      std::move(tokens), {Worker::padded_heads(heads), inputs.size},
      [&] { return std::make_unique<Worker>(inputs, heads, scale); },
      [&](const SelectingToken<Rows>& token, const Partial<T>& result, int64_t begin, int64_t end) {
        const int64_t row = token.first_row;
        MlaOutputs<Input, T>{to + row * inputs.size, lse ? lse + row : nullptr,
                             sink ? sink + token.first_head : nullptr}
            .store(result, begin, end, inputs.size);
      });
}

void sparse_flash_mla(const SparseFlashMla& op, SparseFlashMla::Outputs& outputs) {
  const MlaInputs inputs(op);
  const auto& [out, softmax_lse] = outputs;
  inputs.zero_unused({out, softmax_lse});
  dispatch_operand(out.scalar_type(), [&]<typename Input, typename Operand>() {
    attend<Input, Operand>(inputs, op.options.scale_value, outputs);
  });
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) { register_kernel<SparseFlashMla, sparse_flash_mla>(m); }

}  // namespace
}  // namespace ascend_attn::cpu

void ascend_attn::SparseFlashMla::check_values() const { const cpu::MlaInputs checked(*this); }
