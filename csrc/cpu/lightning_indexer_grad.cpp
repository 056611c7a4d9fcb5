#include "ops/lightning_indexer.h"

#include <torch/library.h>

#include <algorithm>
#include <array>
#include <memory>
#include <tuple>
#include <vector>

#include "core/sparse_mode.h"
#include "cpu/common/indexer_gradient.h"
#include "cpu/common/sparse_indices.h"
#include "dispatch/operator.h"
#include "ops/sparse_rules.h"

namespace ascend_attn::cpu {
namespace {

template <typename Input, typename Operand>
class Gradient {
 public:
  using T = Accumulator<Operand>;

  Gradient(int64_t heads, int64_t size) : gradient_(heads, size), logits_(gradient_.new_logits()) {}

  IndexerGradient<Input, Operand>& of_token() { return gradient_; }

  // Adds the gradients of the keys named by the first `slots` indices, up to the first -1.
  void add_keys(const TokenRows<Input>& key, const int32_t* indices, const Input* d_values,
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
void compute(const LightningIndexerGrad& op, const std::vector<Sequence>& sequences,
             const LightningIndexerGrad::Outputs& outputs) {
  using T = Accumulator<Operand>;
  // Not structured bindings: Clang 16 cannot capture those where OpenMP is enabled.
  const auto& d_query = std::get<0>(outputs);
  const auto& d_key = std::get<1>(outputs);
  const auto& d_weights = std::get<2>(outputs);
  const auto query = with_dense_rows(op.query);
  const auto key = with_dense_rows(op.key);
  const auto d_values = with_dense_rows(with_head_axis(op.d_values, op.query));
  const auto indices = with_dense_rows(with_head_axis(op.sparse_indices, op.query));
  const HeadWeights<Input> weights(op.weights);

  KeySums<T, Gradient<Input, Operand>> add_tokens(sequences, key.size(-1));
  for (const auto& sequence : sequences) {
    const TokenRows<Input> queries(query, sequence.query_begin);
    const TokenRows<Input> keys(key, sequence.key_begin);
    const TokenRows<Input> d_value_rows(d_values, sequence.query_begin);
    const TokenRows<int32_t> index_rows(indices, sequence.query_begin);
    const auto visible = visible_keys_of(op, sequence);
    add_tokens(
        sequence,
        [&] { return std::make_unique<Gradient<Input, Operand>>(query.size(-2), query.size(-1)); },
        [&](Gradient<Input, Operand>& gradient, RowSums<T>& d_keys, int64_t token) {
          const int64_t row = sequence.query_begin + token;
          gradient.of_token().load_query(queries, weights, token, row);
          gradient.add_keys(keys, index_rows.row(token), d_value_rows.row(token),
                            std::min(indices.size(-1), visible.end(token)), d_keys);
          gradient.of_token().store(row, d_query, d_weights);
        },
        key_gradient<Input>(sequence, d_key));
  }
}

void lightning_indexer_grad(const LightningIndexerGrad& op,
                            LightningIndexerGrad::Outputs& outputs) {
  const auto sequences = sequences_of(op);
  op.check_key_lengths(sequences);
  check_sparse_indices(op.name, op.layout.value(), with_head_axis(op.sparse_indices, op.query),
                       op.key.size(-3), sequences, Selectable::keys_of_sequence);
  zero_unused_gradients(outputs, sequences);
  dispatch_operand(op.query.scalar_type(), [&]<typename Input, typename Operand>() {
    compute<Input, Operand>(op, sequences, outputs);
  });
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<LightningIndexerGrad, lightning_indexer_grad>(m);
}

}  // namespace
}  // namespace ascend_attn::cpu
