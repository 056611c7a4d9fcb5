// Computes the indexer's scores of a token tile by tile. Only the logits (K, Nidx) of its selected
// keys are kept between the softmax and the gradients.
#include "ops/sparse_lightning_indexer_kl_loss_grad.h"

#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "cpu/common/indexer_gradient.h"
#include "cpu/common/read_slots.h"
#include "dispatch/operator.h"
#include "ops/sparse_indices.h"

namespace ascend_attn::cpu {
namespace {

using Op = SparseLightningIndexerKLLossGrad;

// The slots of a token that name keys which it sees.
class VisibleSlots {
 public:
  void reserve(int64_t count) {
    slots_.reserve(count);
    keys_.reserve(count);
  }
  void read(const int32_t* indices, int64_t count, int64_t visible) {
    slots_.clear();
    keys_.clear();
    for (int64_t slot = 0; slot < count; ++slot) {
      if (indices[slot] >= 0 && indices[slot] < visible) {
        slots_.push_back(slot);
        keys_.push_back(indices[slot]);
      }
    }
  }

  int64_t size() const { return static_cast<int64_t>(keys_.size()); }
  const std::vector<int64_t>& slots() const { return slots_; }
  const int32_t* keys() const { return keys_.data(); }

 private:
  std::vector<int64_t> slots_;
  std::vector<int32_t> keys_;
};

// Writes y = softmax(scores) to its slots, and overwrites `scores` with y * sum(target) - target.
template <typename T>
void differentiate(const T* target, const VisibleSlots& visible, T* scores, T* softmax) {
  const auto count = visible.size();
  const T max = *std::max_element(scores, scores + count);
  double sum = 0;
  double mass = 0;
  for (int64_t i = 0; i < count; ++i) {
    sum += std::exp(static_cast<double>(scores[i] - max));
    mass += target[visible.slots()[i]];
  }
  for (int64_t i = 0; i < count; ++i) {
    const auto slot = visible.slots()[i];
    const double y = std::exp(static_cast<double>(scores[i] - max)) / sum;
    softmax[slot] = static_cast<T>(y);
    scores[i] = static_cast<T>(y * mass - static_cast<double>(target[slot]));
  }
}

template <typename Input, typename Operand>
class LossGradient {
 public:
  using T = Accumulator<Operand>;

  LossGradient(int64_t heads, int64_t size, int64_t max_selected)
      : gradient_(heads, size), scores_(1, max_selected) {
    visible_.reserve(max_selected);
    for (int64_t begin = 0; begin < max_selected; begin += kMaxKeys) {
      logits_.push_back(gradient_.new_logits());
    }
  }

  // Writes the gradients of one token, and adds those of its keys to `d_keys`.
  void operator()(const SequenceInputs<Input>& rows, const HeadWeights<Input>& weights,
                  const T* target, int64_t token, RowSums<T>& d_keys, const Op::Outputs& outputs) {
    const auto row = rows.row(token);
    visible_.read(rows.sparse_indices.row(token), rows.slots(token), rows.visible.end(token));
    gradient_.load_query(rows.query, weights, token, row);
    if (visible_.size() > 0) {
      for_each_tile(rows.key, [&](int64_t begin, const Tile<T>& logits) {
        gradient_.logits(logits);
        gradient_.scores(logits, scores_.data() + begin);
      });
      auto* softmax = std::get<3>(outputs).template mutable_data_ptr<T>() + row * rows.count;
      differentiate(target, visible_, scores_.data(), softmax);
      for_each_tile(rows.key, [&](int64_t begin, const Tile<T>& logits) {
        gradient_.add(logits, scores_.data() + begin, d_keys, visible_.keys() + begin);
      });
    }
    gradient_.store(row, std::get<0>(outputs), std::get<2>(outputs));
  }

 private:
  static constexpr int64_t kMaxKeys = IndexerGradient<Input, Operand>::kMaxKeys;

  template <typename Function>
  void for_each_tile(const KeyRows<Input>& key, const Function& function) {
    for (int64_t begin = 0; begin < visible_.size(); begin += kMaxKeys) {
      gradient_.load_keys(key, visible_.keys() + begin,
                          std::min(kMaxKeys, visible_.size() - begin));
      function(begin, logits_[begin / kMaxKeys]);
    }
  }

  IndexerGradient<Input, Operand> gradient_;
  VisibleSlots visible_;
  std::vector<Tile<T>> logits_;
  Tile<T> scores_;
};

template <typename Input, typename Operand>
void compute(const Op& op, const SparseInputs& inputs, const Op::Outputs& outputs) {
  using T = Accumulator<Operand>;
  using Worker = LossGradient<Input, Operand>;
  const auto target = with_dense_rows(with_head_axis(op.attn_softmax_l1_norm, op.query_index));
  const HeadWeights<Input> weights(op.weights);
  // Indices may repeat: a row reads as many slots as it sees keys.
  const int64_t max_selected =
      std::min(inputs.sparse_indices.size(-1), longest(inputs.sequences, &Sequence::keys));
  KeySums<T, Worker> add_tokens(inputs.sequences, inputs.size);
  for (const auto& sequence : inputs.sequences) {
    const SequenceInputs<Input> rows(inputs, sequence);
    const TokenRows<T> target_rows(target, sequence.query_begin);
    add_tokens(
        sequence, [&] { return std::make_unique<Worker>(inputs.heads, inputs.size, max_selected); },
        [&](Worker& worker, RowSums<T>& d_keys, int64_t token) {
          worker(rows, weights, target_rows.row(token), token, d_keys, outputs);
        },
        key_gradient<Input>(sequence, std::get<1>(outputs)));
  }
}

void sparse_lightning_indexer_kl_loss_grad(const Op& op, Op::Outputs& outputs) {
  const SparseInputs inputs(op.selection());
  op.check_key_lengths(inputs.sequences);
  const auto& [d_query_index, d_key_index, d_weights, softmax_out] = outputs;
  inputs.zero_unused({d_query_index, d_weights}, {d_key_index});
  std::get<3>(outputs).zero_();
  dispatch_operand(op.query_index.scalar_type(), [&]<typename Input, typename Operand>() {
    compute<Input, Operand>(op, inputs, outputs);
  });
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<SparseLightningIndexerKLLossGrad, sparse_lightning_indexer_kl_loss_grad>(m);
}

}  // namespace
}  // namespace ascend_attn::cpu

void ascend_attn::SparseLightningIndexerKLLossGrad::check_values() const {
  const cpu::SparseInputs checked(selection());
  check_key_lengths(checked.sequences);
  cpu::check_no_gaps(name, checked);
}
