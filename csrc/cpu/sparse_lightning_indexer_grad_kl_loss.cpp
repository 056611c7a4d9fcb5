// Computes the target and the indexer's scores of a token tile by tile. Only the logits
// (K, Nidx) of its selected keys are kept between the softmax and the gradients.
#include "ops/sparse_lightning_indexer_grad_kl_loss.h"

#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "core/sparse_mode.h"
#include "cpu/common/indexer_gradient.h"
#include "cpu/common/query_key_product.h"
#include "cpu/common/read_slots.h"
#include "cpu/common/softmax_statistics.h"
#include "dispatch/operator.h"
#include "ops/sparse_indices.h"

namespace ascend_attn::cpu {
namespace {

using Op = SparseLightningIndexerGradKLLoss;

// Returns softmax_max or softmax_sum, (B, 1, S1, N1) or (1, T1, N1), with one row per token.
at::Tensor by_token(const at::Tensor& statistics) {
  return with_dense_rows(statistics.squeeze(-3).unsqueeze(-2));
}

// The rows of one sequence.
template <typename Input, typename T>
struct LossRows {
  SequenceInputs<Input> attention;
  TokenRows<Input> query_index;
  KeyRows<Input> key_index;
  TokenRows<T> softmax_max, softmax_sum;
};

// Returns KL(target || softmax(scores)) and overwrites `scores` with its gradient.
template <typename T>
double divergence(const T* target, T* scores, int64_t count) {
  constexpr double epsilon = 1e-8;
  const T max = *std::max_element(scores, scores + count);
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    sum += std::exp(static_cast<double>(scores[i] - max));
  }
  const double log_sum = std::log(sum);
  double loss = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double log_y = static_cast<double>(scores[i] - max) - log_sum;
    const double p = std::max<double>(target[i], epsilon);
    loss += p * (std::log(p) - std::max(log_y, std::log(epsilon)));
    scores[i] = static_cast<T>(std::exp(log_y)) - target[i];
  }
  return loss;
}

template <typename Input, typename Operand>
class TokenLoss {
 public:
  using T = Accumulator<Operand>;

  TokenLoss(const SparseInputs& inputs, const Op& op, int64_t max_selected)
      : heads_(inputs.heads),
        scale_(static_cast<T>(op.scale_value)),
        product_(padded_heads_, {inputs.size, inputs.rope_size}, kMaxKeys),
        gradient_(op.query_index.size(-2), op.query_index.size(-1)),
        target_(1, max_selected),
        scores_(1, max_selected) {
    positions_.reserve(max_selected);
    for (int64_t begin = 0; begin < max_selected; begin += kMaxKeys) {
      logits_.push_back(gradient_.new_logits());
    }
  }

  // Returns `factor` times the loss of one token. Its gradients go to `outputs` and to `d_keys`. A
  // token whose factor is 0 is not read.
  double operator()(const LossRows<Input, T>& rows, const HeadWeights<Input>& weights, T factor,
                    int64_t token, RowSums<T>& d_keys, const Op::Outputs& outputs) {
    const auto& attention = rows.attention;
    const int64_t row = attention.row(token);
    const auto* indices = attention.sparse_indices.row(token);
    positions_.clear();
    std::copy_if(indices, indices + attention.slots(token), std::back_inserter(positions_),
                 [](int32_t index) { return index != -1; });
    gradient_.load_query(rows.query_index, weights, token, row);
    double loss = 0;
    if (!positions_.empty() && factor != 0) {
      load_attention(rows, token);
      for_each_tile([&](int64_t begin, int64_t count, const Tile<T>& logits) {
        const auto* positions = positions_.data() + begin;
        product_.multiply(product_.load_keys(attention.key, attention.key_rope, positions, count),
                          attention_);
        mean_of_heads(count, target_.data() + begin);
        gradient_.load_keys(rows.key_index, positions, count);
        gradient_.logits(logits);
        gradient_.scores(logits, scores_.data() + begin);
      });
      const auto count = static_cast<int64_t>(positions_.size());
      loss = factor * divergence(target_.data(), scores_.data(), count);
      scale(scores_.data(), factor, scores_.data(), count);
      for_each_tile([&](int64_t begin, int64_t count, const Tile<T>& logits) {
        const auto* positions = positions_.data() + begin;
        gradient_.load_keys(rows.key_index, positions, count);
        gradient_.add(logits, scores_.data() + begin, d_keys, positions);
      });
    }
    gradient_.store(row, std::get<0>(outputs), std::get<2>(outputs));
    return loss;
  }

 private:
  static constexpr int64_t kMaxKeys = IndexerGradient<Input, Operand>::kMaxKeys;

  template <typename Function>
  void for_each_tile(const Function& function) {
    const auto selected = static_cast<int64_t>(positions_.size());
    for (int64_t begin = 0; begin < selected; begin += kMaxKeys) {
      function(begin, std::min(kMaxKeys, selected - begin), logits_[begin / kMaxKeys]);
    }
  }

  void load_attention(const LossRows<Input, T>& rows, int64_t token) {
    product_.load_query(rows.attention.query, rows.attention.query_rope, token, heads_);
    const T* sum = rows.softmax_sum.row(token);
    std::copy_n(rows.softmax_max.row(token), heads_, max_.data());
    for (int64_t h = 0; h < heads_; ++h) {
      factor_.data()[h] = T(1) / (sum[h] * static_cast<T>(heads_));
    }
  }

  // target[i] = mean over heads of exp(score - max) / sum
  void mean_of_heads(int64_t count, T* target) const {
    // Without the heads of padding, whose scores an infinite key makes NaN.
    vectorized([=, heads = heads_, stride = padded_heads_, scale = scale_,
                scores = attention_.data(), max = max_.data(), factor = factor_.data()] {
      for (int64_t i = 0; i < count; ++i) {
        target[i] = sum_of<T>(heads, [=, row = scores + i * stride](int64_t h) {
          return softmax_weight(rounded_product(row[h], scale), max[h]) * factor[h];
        });
      }
    });
  }

  int64_t heads_;
  int64_t padded_heads_ = round_up(heads_, kTileStep);
  T scale_;
  QueryKeyProduct<Input, Operand> product_;
  Tile<T> attention_{kMaxKeys, padded_heads_};  // scores of a tile, (keys, heads)
  Tile<T> max_{1, padded_heads_};
  Tile<T> factor_{1, padded_heads_};
  IndexerGradient<Input, Operand> gradient_;
  std::vector<int32_t> positions_;
  std::vector<Tile<T>> logits_;
  Tile<T> target_;
  Tile<T> scores_;
};

template <typename Input, typename Operand>
double compute(const Op& op, const SparseInputs& inputs, const Op::Outputs& outputs) {
  using T = Accumulator<Operand>;
  using Worker = TokenLoss<Input, Operand>;
  const auto& sequences = inputs.sequences;
  const auto query_index = with_dense_rows(op.query_index);
  const auto key_index = with_dense_rows(op.key_index);
  const auto softmax_max = by_token(op.softmax_max);
  const auto softmax_sum = by_token(op.softmax_sum);
  const HeadWeights<Input> weights(op.weights);
  const auto factors = op.token_weight
                           ? op.token_weight->to(at::CppTypeToScalarType<T>::value).contiguous()
                           : at::Tensor();
  const T* factor = op.token_weight ? factors.template const_data_ptr<T>() : nullptr;
  const int64_t max_selected =
      std::min(inputs.sparse_indices.size(-1), longest(sequences, &Sequence::keys));
  for (const auto& sequence : sequences) {
    const int64_t first = sequence.query_begin;
    const TokenRows<T> max(softmax_max, first), sum(softmax_sum, first);
    for (int64_t token = 0; token < sequence.queries; ++token) {
      if (factor == nullptr || factor[first + token] != 0) {
        check_statistics(op.name, max.row(token), sum.row(token), inputs.heads);
      }
    }
  }
  KeySums<T, Worker> add_tokens(sequences, key_index.size(-1));
  // One loss per token, summed in token order, so that the sum does not depend on the number of
  // threads.
  std::vector<double> losses(longest(sequences, &Sequence::queries));
  double loss = 0;
  for (const auto& sequence : sequences) {
    const int64_t first = sequence.query_begin;
    const LossRows<Input, T> rows{{inputs, sequence},
                                  {query_index, first},
                                  {key_index, inputs.block_table, sequence},
                                  {softmax_max, first},
                                  {softmax_sum, first}};
    add_tokens(
        sequence, [&] { return std::make_unique<Worker>(inputs, op, max_selected); },
        [&](Worker& worker, RowSums<T>& d_keys, int64_t token) {
          losses[token] =
              worker(rows, weights, factor ? factor[first + token] : T(1), token, d_keys, outputs);
        },
        key_gradient<Input>(sequence, std::get<1>(outputs)));
    loss = std::accumulate(losses.begin(), losses.begin() + sequence.queries, loss);
  }
  return loss;
}

void sparse_lightning_indexer_grad_kl_loss(const Op& op, Op::Outputs& outputs) {
  const SparseInputs inputs(op);
  const auto& [d_query_index, d_key_index, d_weights, loss] = outputs;
  inputs.zero_unused({d_query_index, d_weights}, {d_key_index});
  dispatch_operand(op.query.scalar_type(), [&]<typename Input, typename Operand>() {
    std::get<3>(outputs).fill_(compute<Input, Operand>(op, inputs, outputs));
  });
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<SparseLightningIndexerGradKLLoss, sparse_lightning_indexer_grad_kl_loss>(m);
}

}  // namespace
}  // namespace ascend_attn::cpu

void ascend_attn::SparseLightningIndexerGradKLLoss::check_values() const {
  cpu::check_no_gaps(name, cpu::SparseInputs(*this));
}
