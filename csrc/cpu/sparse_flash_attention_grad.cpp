// Recomputes the probabilities, tile by tile, from the softmax statistics of the forward operator.
#include "ops/sparse_flash_attention.h"

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "cpu/common/parallel_scatter_add.h"
#include "cpu/common/query_key_product.h"
#include "cpu/common/softmax_statistics.h"
#include "cpu/common/sparse_inputs.h"
#include "cpu/common/tile_gemm.h"
#include "cpu/common/token_rows.h"
#include "cpu/common/vectorized.h"
#include "dispatch/operator.h"
#include "dispatch/registration.h"

namespace ascend_attn::cpu {
namespace {

constexpr int64_t kMaxKeys = 64;  // per tile, so that its products stay in the L2 cache

// The rows of one sequence.
template <typename Input, typename T>
struct GradRows {
  SequenceInputs<Input> inputs;
  TokenRows<Input> d_out, out;
  const T *softmax_max, *softmax_sum;  // (tokens, heads)
  Input *d_query, *d_query_rope;       // (tokens, heads, D) and (tokens, heads, Dr)
};

template <typename Input, typename Operand>
class AttentionGrad {
 public:
  using T = Accumulator<Operand>;

  AttentionGrad(const SparseInputs& inputs, T scale)
      : heads_(inputs.heads),
        columns_{inputs.size, inputs.rope_size},
        scale_(scale),
        value_tile_(inputs.value_is_key(), kMaxKeys, inputs.size) {}

  // Computes the gradients of the query of one token, and adds its contribution to the sums over
  // tokens.
  void token(const GradRows<Input, T>& rows, int64_t token, RowSums<T>& sums) {
    auto selected = rows.inputs.selected(token);
    Input* d_query = rows.d_query + token * heads_ * columns_.nope;
    Input* d_query_rope = rows.d_query_rope + token * heads_ * columns_.rope;
    std::array<int64_t, kMaxKeys> positions;
    int64_t count = selected.next(positions.data(), kMaxKeys);
    if (count == 0) {
      std::fill_n(d_query, heads_ * columns_.nope, Input(0));
      std::fill_n(d_query_rope, heads_ * columns_.rope, Input(0));
      return;
    }
    load_token(rows, token);
    for (bool first = true; count > 0; first = false) {
      add_keys(rows.inputs, positions.data(), count, first, sums);
      count = selected.next(positions.data(), kMaxKeys);
    }
    store_heads(d_query_, 0, heads_, columns_.nope, scale_, d_query);
    store_heads(d_query_, columns_.rope_begin(), heads_, columns_.rope, scale_, d_query_rope);
  }

 private:
  void load_token(const GradRows<Input, T>& rows, int64_t token) {
    const auto& inputs = rows.inputs;
    product_.load_query(inputs.query, inputs.query_rope, token, heads_);
    load_heads(rows.d_out, token, heads_, columns_.nope, d_out_);
    pack_transposed(columns_.rope_begin(), padded_heads_, d_out_, packed_d_out_transposed_.data());
    d_out_operand_ = operand_b(padded_heads_, columns_.nope, d_out_, packed_d_out_);
    query_operand_ = operand_b(padded_heads_, columns_.width(), product_.query(), packed_query_);
    for (int64_t h = 0; h < heads_; ++h) {
      max()[h] = rows.softmax_max[token * heads_ + h];
      inverse_sum()[h] = T(1) / rows.softmax_sum[token * heads_ + h];
      delta()[h] = dot(rows.d_out.row(token, h), rows.out.row(token, h), columns_.nope);
    }
  }

  void add_keys(const SequenceInputs<Input>& inputs, const int64_t* positions, int64_t count,
                bool first, RowSums<T>& sums) {
    const int64_t rows = product_.load_keys(inputs.key, inputs.key_rope, positions, count);
    const auto& keys = product_.keys();
    const auto& values = value_tile_.load(inputs.value, keys, positions, count, rows);
    product_.multiply(rows, scores_);
    tile_gemm({rows, padded_heads_, columns_.rope_begin(), values, packed_d_out_transposed_,
               d_probabilities_, false});
    differentiate_softmax(count);

    multiply_heads(probabilities_, rows, d_out_operand_, columns_.nope);
    sums.add(positions, count, d_keys_, columns_.nope, 0);
    multiply_heads(d_scores_, rows, query_operand_, columns_.width());
    sums.add(positions, count, d_keys_, columns_.nope, columns_.nope);
    sums.add(positions, count, d_keys_.from(0, columns_.rope_begin()), columns_.rope,
             2 * columns_.nope);

    zero_rows(d_scores_, count, rows);
    transpose(d_scores_, rows, padded_heads_, d_scores_by_head_);
    tile_gemm({padded_heads_, columns_.width(), rows, d_scores_by_head_,
               operand_b(rows, columns_.width(), keys, packed_keys_), d_query_, !first});
  }

  // d_keys (rows, n) = by_key (rows, heads) * operand (heads, n)
  void multiply_heads(const Tile<Operand>& by_key, int64_t rows, Matrix<const Operand> operand,
                      int64_t n) {
    tile_gemm({rows, n, padded_heads_, by_key, operand, d_keys_, false});
  }

  // P = exp(scale * scores - max) / sum and dS = P * (dP - delta), both as operands. They stay 0
  // for the heads of padding, whose scores an infinite key makes NaN.
  void differentiate_softmax(int64_t count) {
    vectorized([count, heads = heads_, stride = padded_heads_, scale = scale_,
                scores = scores_.data(), d_probabilities = d_probabilities_.data(),
                probabilities = probabilities_.data(), d_scores = d_scores_.data(), max = max(),
                inverse_sum = inverse_sum(), delta = delta()] {
      for (int64_t i = 0; i < count; ++i) {
        // Compilers do not test at run time whether so many pointers overlap.
#pragma omp simd
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t at = i * stride + h;
          const T p = softmax_weight(rounded_product(scores[at], scale), max[h]) * inverse_sum[h];
          probabilities[at] = round_to<Operand>(p);
          d_scores[at] = round_to<Operand>(p * (d_probabilities[at] - delta[h]));
        }
      }
    });
  }

  T* max() const { return statistics_.row(0); }
  T* inverse_sum() const { return statistics_.row(1); }
  T* delta() const { return statistics_.row(2); }

  int64_t heads_;
  int64_t padded_heads_ = round_up(heads_, depth_step<Operand>);
  HeadColumns<Operand> columns_;
  T scale_;
  QueryKeyProduct<Input, Operand> product_{padded_heads_, columns_, kMaxKeys};
  Tile<Operand> packed_query_{padded_heads_, columns_.width()};
  Tile<Operand> packed_keys_{kMaxKeys, columns_.width()};
  ValueTile<Input, Operand> value_tile_;
  Tile<Operand> d_out_{padded_heads_, columns_.rope_begin()};
  Tile<Operand> packed_d_out_{padded_heads_, columns_.rope_begin()};
  Tile<Operand> packed_d_out_transposed_{columns_.rope_begin(), padded_heads_};
  Matrix<const Operand> d_out_operand_;
  Matrix<const Operand> query_operand_;
  Tile<T> scores_{kMaxKeys, padded_heads_};
  Tile<T> d_probabilities_{kMaxKeys, padded_heads_};
  Tile<Operand> probabilities_{kMaxKeys, padded_heads_};
  Tile<Operand> d_scores_{kMaxKeys, padded_heads_};
  Tile<Operand> d_scores_by_head_{padded_heads_, kMaxKeys};
  Tile<T> d_keys_{kMaxKeys, columns_.width()};
  Tile<T> d_query_{padded_heads_, columns_.width()};
  Tile<T> statistics_{3, padded_heads_};
};

template <typename Input, typename Operand>
void differentiate(const SparseFlashAttentionGrad& op, const SparseInputs& inputs,
                   const SparseFlashAttentionGrad::Outputs& outputs) {
  using T = Accumulator<Operand>;
  using Worker = AttentionGrad<Input, Operand>;
  const auto d_out = with_dense_rows(op.d_out);
  const auto out = with_dense_rows(op.out);
  const auto softmax_max = op.softmax_max.contiguous();
  const auto softmax_sum = op.softmax_sum.contiguous();
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
    const GradRows<Input, T> rows{{inputs, sequence},
                                  {d_out, sequence.query_begin},
                                  {out, sequence.query_begin},
                                  softmax_max.template const_data_ptr<T>() + token_begin,
                                  softmax_sum.template const_data_ptr<T>() + token_begin,
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

const Registration kernels(c10::DispatchKey::CPU, [](torch::Library& m) {
  register_kernel<SparseFlashAttentionGrad, sparse_flash_attention_grad>(m);
});

}  // namespace
}  // namespace ascend_attn::cpu

void ascend_attn::SparseFlashAttentionGrad::check_values() const {
  const cpu::SparseInputs checked(*this);
}
