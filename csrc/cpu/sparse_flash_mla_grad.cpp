#include "ops/sparse_flash_mla.h"

#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "cpu/common/mla_inputs.h"
#include "cpu/common/parallel_scatter_add.h"
#include "cpu/common/token_gradient.h"
#include "dispatch/operator.h"

namespace ascend_attn::cpu {
namespace {

// The rows of one sequence.
template <typename Input, typename T>
struct MlaGradRows {
  MlaRows<Input> inputs;
  TokenRows<Input> d_out, out;
  const T* softmax_lse;    // (tokens, heads)
  const T* d_softmax_lse;  // the same; null if nothing flows into the statistics
  Input* d_query;          // (tokens, heads, D)
  T* cmp_softmax_l1_norm;  // (tokens, K); null without indices
};

template <typename Input, typename Operand>
class MlaGradient {
 public:
  using Gradient = TokenGradient<MlaRows<Input>, Operand>;
  using T = Accumulator<Operand>;

  MlaGradient(const MlaInputs& inputs, T scale)
      : gradient_(inputs, scale),
        ones_(static_cast<size_t>(inputs.heads), T(1)),
        d_weights_(static_cast<size_t>(inputs.heads)),
        d_sink_(static_cast<size_t>(inputs.heads)),
        sink_(inputs.sink.defined() ? inputs.sink.template const_data_ptr<T>() : nullptr) {}

  // Computes the gradient of the query of one token, and adds its contribution to the sums over
  // tokens.
  void token(const MlaGradRows<Input, T>& rows, int64_t token, RowSums<T>& sums) {
    const int64_t heads = gradient_.heads();
    const int64_t size = gradient_.columns().nope;
    auto selected = rows.inputs.selected(token);
    Input* d_query = rows.d_query + token * heads * size;
    Mass mass(rows, token);
    std::array<int64_t, Gradient::kMaxKeys> positions;
    int64_t count = selected.next(positions.data(), Gradient::kMaxKeys);
    if (count == 0) {
      std::fill_n(d_query, heads * size, Input(0));
      return;
    }
    const T* lse = rows.softmax_lse + token * heads;
    const T* d_lse = rows.d_softmax_lse ? rows.d_softmax_lse + token * heads : nullptr;
    gradient_.load_token(rows.inputs, rows.d_out, rows.out, token, lse, ones_.data(), d_lse);
    std::fill(d_weights_.begin(), d_weights_.end(), 0);
    for (bool first = true; count > 0; first = false) {
      const int64_t tile_rows = gradient_.differentiate(rows.inputs, positions.data(), count);
      add_weights(rows, positions.data(), count, mass);
      gradient_.multiply_query(tile_rows, d_keys_);
      for (int64_t i = 0; i < count; ++i) {
        cpu::scale(d_keys_.row(i), gradient_.scale(), d_keys_.row(i), size);
      }
      gradient_.multiply_d_out(tile_rows, d_keys_, /*add=*/true);
      sums.add(positions.data(), count, d_keys_, size, 0);
      gradient_.add_to_query(count, tile_rows, first);
      count = selected.next(positions.data(), Gradient::kMaxKeys);
    }
    gradient_.store_query(d_query, nullptr);
    for (int64_t h = 0; sink_ != nullptr && h < heads; ++h) {
      const double d_score = (d_lse ? static_cast<double>(d_lse[h]) : 0) - d_weights_[h];
      d_sink_[h] += static_cast<double>(softmax_weight(sink_[h], lse[h])) * d_score;
    }
  }

  const std::vector<double>& d_sink() const { return d_sink_; }

 private:
  // The slots of a row of cmp_softmax_l1_norm, which are visited in order. Slots whose keys are not
  // read are 0.
  class Mass {
   public:
    Mass(const MlaGradRows<Input, T>& rows, int64_t token) {
      if (rows.cmp_softmax_l1_norm) {
        next_ = rows.cmp_softmax_l1_norm + token * rows.inputs.count;
        std::fill_n(next_, rows.inputs.count, T(0));
        index_ = rows.inputs.indices.row(token);
      }
    }
    bool wanted() const { return next_ != nullptr; }
    void set(int64_t compressed_key, T value) {
      while (*index_ != compressed_key) {
        ++index_;
        ++next_;
      }
      *next_++ = value;
      ++index_;
    }

   private:
    T* next_ = nullptr;
    const int32_t* index_ = nullptr;
  };

  // Adds the products of weights and their gradients, and sets the means of weights over heads.
  void add_weights(const MlaGradRows<Input, T>& rows, const int64_t* positions, int64_t count,
                   Mass& mass) {
    const int64_t heads = gradient_.heads();
    const int64_t originals = rows.inputs.sequence.originals.keys;
    for (int64_t i = 0; i < count; ++i) {
      const T* weights = gradient_.weights().row(i);
      if (sink_ != nullptr) {
        const T* d_weights = gradient_.d_weights().row(i);
        for (int64_t h = 0; h < heads; ++h) {
          d_weights_[h] += static_cast<double>(weights[h]) * d_weights[h];
        }
      }
      if (mass.wanted() && positions[i] >= originals) {
        T sum = 0;
        for (int64_t h = 0; h < heads; ++h) {
          sum += weights[h];
        }
        mass.set(positions[i] - originals, sum / static_cast<T>(std::max<int64_t>(heads, 1)));
      }
    }
  }

  Gradient gradient_;
  Tile<T> d_keys_{Gradient::kMaxKeys, gradient_.columns().width()};
  std::vector<T> ones_;
  std::vector<double> d_weights_;  // sums over the keys of a token
  std::vector<double> d_sink_;
  const T* sink_;
};

template <typename Input, typename Operand>
void differentiate(const SparseFlashMlaGrad& op, const MlaInputs& inputs,
                   const SparseFlashMlaGrad::Outputs& outputs) {
  using T = Accumulator<Operand>;
  using Worker = MlaGradient<Input, Operand>;
  const auto& [d_query, d_ori_kv, d_cmp_kv, d_sink, cmp_softmax_l1_norm] = outputs;
  const auto d_out = with_dense_rows(op.d_out ? *op.d_out : at::zeros_like(op.out));
  const auto out = with_dense_rows(op.out);
  const auto softmax_lse = op.softmax_lse.contiguous();
  const auto d_softmax_lse = op.d_softmax_lse ? op.d_softmax_lse->contiguous() : at::Tensor();
  const int64_t size = inputs.size;
  const auto scale = static_cast<T>(op.options.scale_value);
  const auto joined = inputs.joined_sequences();
  KeySums<T, Worker> add_tokens(joined, size);
  const auto sequences = inputs.by_sequence<Input>();
  for (size_t b = 0; b < joined.size(); ++b) {
    const auto& sequence = sequences[b].sequence;
    const int64_t begin = sequence.originals.query_begin;
    const MlaGradRows<Input, T> rows{
        sequences[b],
        {d_out, begin},
        {out, begin},
        softmax_lse.template const_data_ptr<T>() + begin * inputs.heads,
        d_softmax_lse.defined() ? d_softmax_lse.template const_data_ptr<T>() + begin * inputs.heads
                                : nullptr,
        d_query.template mutable_data_ptr<Input>() + begin * inputs.heads * size,
        inputs.indices.defined()
            ? cmp_softmax_l1_norm.template mutable_data_ptr<T>() + begin * sequences[b].count
            : nullptr};
    auto* d_originals =
        d_ori_kv.template mutable_data_ptr<Input>() + sequence.originals.key_begin * size;
    auto* d_compressed =
        d_cmp_kv.template mutable_data_ptr<Input>() + sequence.compressed.key_begin * size;
    add_tokens(
        joined[b], [&] { return std::make_unique<Worker>(inputs, scale); },
        [&](Worker& worker, RowSums<T>& sums, int64_t token) { worker.token(rows, token, sums); },
        [&](int64_t key, const T* sum) {
          const int64_t originals = sequence.originals.keys;
          auto* to =
              key < originals ? d_originals + key * size : d_compressed + (key - originals) * size;
          cpu::scale(sum, T(1), to, size);
        });
  }
  if (inputs.sink.defined()) {
    auto* to = d_sink.template mutable_data_ptr<T>();
    for (int64_t h = 0; h < inputs.heads; ++h) {
      double sum = 0;
      for (const auto& worker : add_tokens.workers()) {
        sum += worker ? worker->d_sink()[h] : 0;
      }
      to[h] = static_cast<T>(sum);
    }
  }
}

void sparse_flash_mla_grad(const SparseFlashMlaGrad& op, SparseFlashMlaGrad::Outputs& outputs) {
  const MlaInputs inputs(op);
  const auto& [d_query, d_ori_kv, d_cmp_kv, d_sink, cmp_softmax_l1_norm] = outputs;
  inputs.zero_unused({d_query, cmp_softmax_l1_norm}, d_ori_kv, d_cmp_kv);
  dispatch_operand(d_query.scalar_type(), [&]<typename Input, typename Operand>() {
    differentiate<Input, Operand>(op, inputs, outputs);
  });
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<SparseFlashMlaGrad, sparse_flash_mla_grad>(m);
}

}  // namespace
}  // namespace ascend_attn::cpu

void ascend_attn::SparseFlashMlaGrad::check_values() const { const cpu::MlaInputs checked(*this); }
