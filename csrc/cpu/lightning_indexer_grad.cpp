#include "ops/lightning_indexer.h"

#include <torch/library.h>

#include <algorithm>
#include <array>
#include <memory>
#include <tuple>
#include <vector>

#include "core/sparse_mode.h"
#include "cpu/common/indexer_gradient.h"
#include "cpu/common/read_slots.h"
#include "dispatch/operator.h"
#include "ops/sparse_indices.h"

namespace ascend_attn::cpu {
namespace {

template <typename Input, typename Operand>
class Gradient {
 public:
  using T = Accumulator<Operand>;

  Gradient(int64_t heads, int64_t size) : gradient_(heads, size), logits_(gradient_.new_logits()) {}

  IndexerGradient<Input, Operand>& of_token() { return gradient_; }

  // Adds the gradients of the keys named by the first `slots` indices, up to the first -1.
  void add_keys(const KeyRows<Input>& key, const int32_t* indices, const Input* d_values,
                int64_t slots, RowSums<T>& d_keys) {
    constexpr int64_t max_keys = IndexerGradient<Input, Operand>::kMaxKeys;
    std::array<T, max_keys> d_scores;
    const int64_t count = std::find(indices, indices + slots, -1) - indices;
    for (int64_t begin = 0; begin < count; begin += max_keys) {
      const int64_t keys = std::min(max_keys, count - begin);
      convert(d_values + begin, d_scores.data(), keys);
      gradient_.load_keys(key, indices + begin, keys);
      gradient_.logits(logits_);
      gradient_.add(logits_, d_scores.data(), d_keys, indices + begin);
    }
  }

 private:
  IndexerGradient<Input, Operand> gradient_;
  Tile<T> logits_;
};

template <typename Input, typename Operand>
void compute(const LightningIndexerGrad& op, const SparseInputs& inputs,
             const LightningIndexerGrad::Outputs& outputs) {
  using T = Accumulator<Operand>;
  using Worker = Gradient<Input, Operand>;
  const auto d_values = with_dense_rows(with_head_axis(op.d_values, op.query));
  const HeadWeights<Input> weights(op.weights);
  KeySums<T, Worker> add_tokens(inputs.sequences, inputs.size);
  for (const auto& sequence : inputs.sequences) {
    const SequenceInputs<Input> rows(inputs, sequence);
    const TokenRows<Input> d_value_rows(d_values, sequence.query_begin);
    add_tokens(
        sequence, [&] { return std::make_unique<Worker>(inputs.heads, inputs.size); },
        [&](Worker& gradient, RowSums<T>& d_keys, int64_t token) {
          gradient.of_token().load_query(rows.query, weights, token, rows.row(token));
          gradient.add_keys(rows.key, rows.sparse_indices.row(token), d_value_rows.row(token),
                            rows.slots(token), d_keys);
          gradient.of_token().store(rows.row(token), std::get<0>(outputs), std::get<2>(outputs));
        },
        key_gradient<Input>(sequence, std::get<1>(outputs)));
  }
}

void lightning_indexer_grad(const LightningIndexerGrad& op,
                            LightningIndexerGrad::Outputs& outputs) {
  const SparseInputs inputs(op);
  const auto& [d_query, d_key, d_weights] = outputs;
  inputs.zero_unused({d_query, d_weights}, {d_key});
  dispatch_operand(op.query.scalar_type(), [&]<typename Input, typename Operand>() {
    compute<Input, Operand>(op, inputs, outputs);
  });
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<LightningIndexerGrad, lightning_indexer_grad>(m);
}

}  // namespace
}  // namespace ascend_attn::cpu

void ascend_attn::LightningIndexerGrad::check_values() const {
  cpu::check_no_gaps(name, cpu::SparseInputs(*this));
}
