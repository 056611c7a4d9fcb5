#include "ops/sparse_flash_attention.h"

#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "cpu/common/parallel_scatter_add.h"
#include "cpu/common/read_slots.h"
#include "cpu/common/softmax_statistics.h"
#include "cpu/common/sparse_inputs.h"
#include "cpu/common/tile_gemm.h"
#include "cpu/common/token_gradient.h"
#include "cpu/common/token_rows.h"
#include "cpu/common/vectorized.h"
#include "dispatch/operator.h"

namespace ascend_attn::cpu {
namespace {

// The rows of one sequence.
template <typename Input, typename T>
struct GradRows {
  SequenceInputs<Input> inputs;
  TokenRows<Input> d_out, out;
  const T *softmax_max, *softmax_sum;  // (tokens, heads)
  const T* d_lse;                      // the same; null if nothing flows into the statistics
  Input *d_query, *d_query_rope;       // (tokens, heads, D) and (tokens, heads, Dr)
};

template <typename Input, typename Operand>
class AttentionGrad {
 public:
  using Gradient = TokenGradient<SequenceInputs<Input>, Operand>;
  using T = Accumulator<Operand>;

  AttentionGrad(const SparseInputs& inputs, T scale)
      : gradient_(inputs, scale), inverse_sum_(1, inputs.heads) {}

  // Computes the gradients of the query of one token, and adds its contribution to the sums over
  // tokens.
  void token(const GradRows<Input, T>& rows, int64_t token, RowSums<T>& sums) {
    const int64_t heads = gradient_.heads();
    const auto& columns = gradient_.columns();
    auto selected = rows.inputs.selected(token);
    Input* d_query = rows.d_query + token * heads * columns.nope;
    Input* d_query_rope = rows.d_query_rope + token * heads * columns.rope;
    std::array<int64_t, Gradient::kMaxKeys> positions;
    int64_t count = selected.next(positions.data(), Gradient::kMaxKeys);
    if (count == 0) {
      std::fill_n(d_query, heads * columns.nope, Input(0));
      std::fill_n(d_query_rope, heads * columns.rope, Input(0));
      return;
    }
    for (int64_t h = 0; h < heads; ++h) {
      inverse_sum_.data()[h] = T(1) / rows.softmax_sum[token * heads + h];
    }
    gradient_.load_token(rows.inputs, rows.d_out, rows.out, token, rows.softmax_max + token * heads,
                         inverse_sum_.data(),
                         rows.d_lse != nullptr ? rows.d_lse + token * heads : nullptr);
    for (bool first = true; count > 0; first = false) {
      add_keys(rows.inputs, positions.data(), count, first, sums);
      count = selected.next(positions.data(), Gradient::kMaxKeys);
    }
    gradient_.store_query(d_query, d_query_rope);
  }

 private:
  void add_keys(const SequenceInputs<Input>& inputs, const int64_t* positions, int64_t count,
                bool first, RowSums<T>& sums) {
    const auto& columns = gradient_.columns();
    const int64_t rows = gradient_.differentiate(inputs, positions, count);
    gradient_.multiply_d_out(rows, d_keys_);
    sums.add(positions, count, d_keys_, columns.nope, 0);
    gradient_.multiply_query(rows, d_keys_);
    sums.add(positions, count, d_keys_, columns.nope, columns.nope);
    sums.add(positions, count, d_keys_.from(0, columns.rope_begin()), columns.rope,
             2 * columns.nope);
    gradient_.add_to_query(count, rows, first);
  }

  Gradient gradient_;
  Tile<T> d_keys_{Gradient::kMaxKeys, gradient_.columns().width()};
  Tile<T> inverse_sum_;
};

template <typename Input, typename Operand>
void differentiate(const SparseFlashAttentionGrad& op, const SparseInputs& inputs,
                   const SparseFlashAttentionGrad::Outputs& outputs) {
  using T = Accumulator<Operand>;
  using Worker = AttentionGrad<Input, Operand>;
  const auto d_out = with_dense_rows(op.d_out ? *op.d_out : at::zeros_like(op.out));
  const auto out = with_dense_rows(op.out);
  const auto softmax_max = op.softmax_max.contiguous();
  const auto softmax_sum = op.softmax_sum.contiguous();
  const auto d_lse =
      op.d_softmax_sum ? op.d_softmax_sum->mul(softmax_sum).contiguous() : at::Tensor();
  const int64_t size = inputs.size;
  const int64_t rope_size = inputs.rope_size;
  KeySums<T, Worker> add_tokens(inputs.sequences, 2 * size + rope_size);
  const auto [d_query, d_key, d_value, d_query_rope, d_key_rope] = std::apply(
      [](const auto&... tensors) {
        return std::array{tensors.template mutable_data_ptr<Input>()...};
      },
      outputs);
  const auto factor = static_cast<T>(op.options.scale_value);
  for (const auto& sequence : inputs.sequences) {
    const int64_t first = sequence.query_begin * inputs.heads;
    check_statistics(op.name, softmax_max.template const_data_ptr<T>() + first,
                     softmax_sum.template const_data_ptr<T>() + first,
                     sequence.queries * inputs.heads);
  }
  for (const auto& sequence : inputs.sequences) {
    const int64_t token_begin = sequence.query_begin * inputs.heads;
    const GradRows<Input, T> rows{
        {inputs, sequence},
        {d_out, sequence.query_begin},
        {out, sequence.query_begin},
        softmax_max.template const_data_ptr<T>() + token_begin,
        softmax_sum.template const_data_ptr<T>() + token_begin,
        d_lse.defined() ? d_lse.template const_data_ptr<T>() + token_begin : nullptr,
        d_query + token_begin * size,
        d_query_rope + token_begin * rope_size};
    add_tokens(
        sequence, [&] { return std::make_unique<Worker>(inputs, factor); },
        [&](Worker& worker, RowSums<T>& sums, int64_t token) { worker.token(rows, token, sums); },
        [&](int64_t key, const T* sum) {
          const int64_t row = sequence.key_begin + key;
          cpu::scale(sum, T(1), d_value + row * size, size);
          cpu::scale(sum + size, factor, d_key + row * size, size);
          cpu::scale(sum + 2 * size, factor, d_key_rope + row * rope_size, rope_size);
        });
  }
}

void sparse_flash_attention_grad(const SparseFlashAttentionGrad& op,
                                 SparseFlashAttentionGrad::Outputs& outputs) {
  const SparseInputs inputs(op);
  const auto& [d_query, d_key, d_value, d_query_rope, d_key_rope] = outputs;
  inputs.zero_unused({d_query, d_query_rope}, {d_key, d_value, d_key_rope});
  dispatch_operand(d_query.scalar_type(), [&]<typename Input, typename Operand>() {
    differentiate<Input, Operand>(op, inputs, outputs);
  });
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<SparseFlashAttentionGrad, sparse_flash_attention_grad>(m);
}

}  // namespace
}  // namespace ascend_attn::cpu

void ascend_attn::SparseFlashAttentionGrad::check_values() const {
  cpu::check_no_gaps(name, cpu::SparseInputs(*this));
}
