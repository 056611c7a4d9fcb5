// Computes the target and the indexer's scores of a token tile by tile. Of its selected keys, only
// the logits (K, Nidx) are kept between the softmax and the gradients.
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
#include "cpu/common/sparse_indices.h"
#include "dispatch/operator.h"
#include "ops/sparse_rules.h"

namespace ascend_attn::cpu {
namespace {

using Op = SparseLightningIndexerGradKLLoss;

// Returns softmax_max or softmax_sum, (B, 1, S1, N1) or (1, T1, N1), with one row per token.
at::Tensor by_token(const at::Tensor& statistics) {
  return with_dense_rows(statistics.squeeze(-3).unsqueeze(-2));
}

// The inputs, with dense rows.
struct Inputs {
  explicit Inputs(const Op& op)
      : query(with_dense_rows(op.query)),
        key(with_dense_rows(op.key)),
        query_rope(op.query_rope ? with_dense_rows(*op.query_rope) : at::Tensor()),
        key_rope(op.key_rope ? with_dense_rows(*op.key_rope) : at::Tensor()),
        query_index(with_dense_rows(op.query_index)),
        key_index(with_dense_rows(op.key_index)),
        sparse_indices(with_dense_rows(with_head_axis(op.sparse_indices, op.query))),
        softmax_max(by_token(op.softmax_max)),
        softmax_sum(by_token(op.softmax_sum)) {}

  int64_t rope_size() const { return query_rope.defined() ? query_rope.size(-1) : 0; }

  at::Tensor query;
  at::Tensor key;
  at::Tensor query_rope;
  at::Tensor key_rope;
  at::Tensor query_index;
  at::Tensor key_index;
  at::Tensor sparse_indices;
  at::Tensor softmax_max;
  at::Tensor softmax_sum;
};

template <typename T>
TokenRows<T> optional_rows(const at::Tensor& tensor, int64_t begin) {
  return tensor.defined() ? TokenRows<T>(tensor, begin) : TokenRows<T>();
}

// The rows of one sequence.
template <typename Input, typename T>
struct SequenceRows {
  SequenceRows(const Inputs& inputs, const Sequence& sequence)
      : query(inputs.query, sequence.query_begin),
        query_rope(optional_rows<Input>(inputs.query_rope, sequence.query_begin)),
        query_index(inputs.query_index, sequence.query_begin),
        key(inputs.key, sequence.key_begin),
        key_rope(optional_rows<Input>(inputs.key_rope, sequence.key_begin)),
        key_index(inputs.key_index, sequence.key_begin),
        sparse_indices(inputs.sparse_indices, sequence.query_begin),
        softmax_max(inputs.softmax_max, sequence.query_begin),
        softmax_sum(inputs.softmax_sum, sequence.query_begin) {}

  TokenRows<Input> query, query_rope, query_index;
  TokenRows<Input> key, key_rope, key_index;
  TokenRows<int32_t> sparse_indices;
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

  TokenLoss(const Inputs& inputs, double scale, int64_t max_selected)
      : heads_(inputs.query.size(-2)),
        scale_(static_cast<T>(scale)),
        product_(padded_heads_, {inputs.query.size(-1), inputs.rope_size()}, kMaxKeys),
        gradient_(inputs.query_index.size(-2), inputs.query_index.size(-1)),
        target_(1, max_selected),
        scores_(1, max_selected) {
    positions_.reserve(max_selected);
    for (int64_t begin = 0; begin < max_selected; begin += kMaxKeys) {
      logits_.push_back(gradient_.new_logits());
    }
  }

  // Returns `factor` times the loss of one token. Its gradients go to row `row` of the outputs and
  // to `d_keys`. A token whose factor is 0 is not read.
  double operator()(const SequenceRows<Input, T>& rows, const HeadWeights<Input>& weights, T factor,
                    int64_t token, int64_t row, int64_t slots, RowSums<T>& d_keys,
                    const Op::Outputs& outputs) {
    positions_.clear();
    const auto* indices = rows.sparse_indices.row(token);
    std::copy_if(indices, indices + slots, std::back_inserter(positions_),
                 [](int32_t index) { return index != -1; });
    gradient_.load_query(rows.query_index, weights, token, row);
    double loss = 0;
    if (!positions_.empty() && factor != 0) {
      load_attention(rows, token);
      for_each_tile([&](int64_t begin, int64_t count, const Tile<T>& logits) {
        const auto* positions = positions_.data() + begin;
        product_.multiply(product_.load_keys(rows.key, rows.key_rope, positions, count),
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

  void load_attention(const SequenceRows<Input, T>& rows, int64_t token) {
    product_.load_query(rows.query, rows.query_rope, token, heads_);
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
          return exponential(scale * row[h] - max[h]) * factor[h];
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
double compute(const Op& op, const std::vector<Sequence>& sequences, const Op::Outputs& outputs) {
  using T = Accumulator<Operand>;
  const Inputs inputs(op);
  const HeadWeights<Input> weights(op.weights);
  const auto factors =
      op.weight ? op.weight->to(at::CppTypeToScalarType<T>::value).contiguous() : at::Tensor();
  const T* factor = op.weight ? factors.template const_data_ptr<T>() : nullptr;
  const int64_t slots = inputs.sparse_indices.size(-1);
  const int64_t max_keys = longest(sequences, &Sequence::keys);
  KeySums<T, TokenLoss<Input, Operand>> add_tokens(sequences, inputs.key_index.size(-1));
  // One loss per token, summed in token order, so that the sum does not depend on the number of
  // threads.
  std::vector<double> losses(longest(sequences, &Sequence::queries));
  double loss = 0;
  for (const auto& sequence : sequences) {
    const SequenceRows<Input, T> rows(inputs, sequence);
    const auto visible = visible_keys_of(op, sequence);
    add_tokens(
        sequence,
        [&] {
          return std::make_unique<TokenLoss<Input, Operand>>(inputs, op.scale_value,
                                                             std::min(slots, max_keys));
        },
        [&](TokenLoss<Input, Operand>& token_loss, RowSums<T>& d_keys, int64_t token) {
          const int64_t row = sequence.query_begin + token;
          losses[token] = token_loss(rows, weights, factor ? factor[row] : T(1), token, row,
                                     std::min(slots, visible.end(token)), d_keys, outputs);
        },
        key_gradient<Input>(sequence, std::get<1>(outputs)));
    loss = std::accumulate(losses.begin(), losses.begin() + sequence.queries, loss);
  }
  return loss;
}

void sparse_lightning_indexer_grad_kl_loss(const Op& op, Op::Outputs& outputs) {
  const auto sequences = sequences_of(op);
  check_sparse_indices(op.name, op.layout.value(), with_head_axis(op.sparse_indices, op.query),
                       op.key.size(-3), sequences, Selectable::keys_of_sequence);
  zero_unused_gradients(outputs, sequences);
  dispatch_operand(op.query.scalar_type(), [&]<typename Input, typename Operand>() {
    std::get<3>(outputs).fill_(compute<Input, Operand>(op, sequences, outputs));
  });
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<SparseLightningIndexerGradKLLoss, sparse_lightning_indexer_grad_kl_loss>(m);
}

}  // namespace
}  // namespace ascend_attn::cpu
