// Recomputes the probabilities, tile by tile, from the softmax statistics of the forward operator.
#include "ops/sparse_flash_attention.h"

#include <torch/library.h>

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "cpu/common/parallel_scatter_add.h"
#include "cpu/common/query_key_product.h"
#include "cpu/common/sparse_attention_inputs.h"
#include "cpu/common/tile_gemm.h"
#include "cpu/common/token_rows.h"
#include "cpu/common/vectorized.h"
#include "dispatch/operator.h"

namespace ascend_attn::cpu {
namespace {

constexpr int64_t kMaxKeys = 64;  // per tile, so that its products stay in the L2 cache

// What the gradient reads besides the inputs of the forward operator.
struct ForwardResults {
  at::Tensor d_out, out;
  at::Tensor softmax_max, softmax_sum;  // dense
};

template <typename Input, typename Operand>
class AttentionGrad {
 public:
  using T = Accumulator<Operand>;

  AttentionGrad(const SparseAttentionInputs& inputs, double scale)
      : heads_(inputs.heads),
        columns_{inputs.size, inputs.rope_size},
        scale_(static_cast<T>(scale)),
        value_tile_(inputs.value_is_key(), kMaxKeys, inputs.size) {}

  // Computes d_query (heads, D) and d_query_rope (heads, Dr) of one token, and adds its
  // contribution to the sums over tokens.
  void token(const SequenceInputs<Input>& inputs, const TokenRows<Input>& d_out,
             const TokenRows<Input>& out, const T* softmax_max, const T* softmax_sum, int64_t token,
             Input* d_query, Input* d_query_rope, RowSums<T>& sums) {
    auto selected = inputs.selected(token);
    std::array<int64_t, kMaxKeys> positions;
    int64_t count = selected.next(positions.data(), kMaxKeys);
    if (count == 0) {
      std::fill_n(d_query, heads_ * columns_.nope, Input(0));
      std::fill_n(d_query_rope, heads_ * columns_.rope, Input(0));
      return;
    }
    load_token(inputs, d_out, out, softmax_max, softmax_sum, token);
    for (bool first = true; count > 0; first = false) {
      add_keys(inputs, positions.data(), count, first, sums);
      count = selected.next(positions.data(), kMaxKeys);
    }
    const auto factor = [this](int64_t) { return scale_; };
    store_heads(d_query_, 0, heads_, columns_.nope, factor, d_query);
    store_heads(d_query_, columns_.rope_begin(), heads_, columns_.rope, factor, d_query_rope);
  }

 private:
  void load_token(const SequenceInputs<Input>& inputs, const TokenRows<Input>& d_out,
                  const TokenRows<Input>& out, const T* softmax_max, const T* softmax_sum,
                  int64_t token) {
    product_.load_query(inputs.query, inputs.query_rope, token, heads_);
    load_heads(d_out, token, heads_, columns_.nope, d_out_);
    pack_transposed(columns_.rope_begin(), padded_heads_, d_out_, packed_d_out_transposed_.data());
    d_out_operand_ = operand_b(padded_heads_, columns_.nope, d_out_, packed_d_out_);
    query_operand_ = operand_b(padded_heads_, columns_.width(), product_.query(), packed_query_);
    for (int64_t h = 0; h < heads_; ++h) {
      max()[h] = softmax_max[h];
      inverse_sum()[h] = T(1) / softmax_sum[h];
      delta()[h] = dot(d_out.row(token, h), out.row(token, h), columns_.nope);
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
          const T p = exponential(scale * scores[at] - max[h]) * inverse_sum[h];
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
void differentiate(const SparseAttentionInputs& inputs, const ForwardResults& forward, double scale,
                   const SparseFlashAttentionGrad::Outputs& outputs) {
  using T = Accumulator<Operand>;
  using Worker = AttentionGrad<Input, Operand>;
  const int64_t heads = inputs.heads;
  const int64_t size = inputs.size;
  const int64_t rope_size = inputs.rope_size;
  KeySums<T, Worker> add_tokens(inputs.sequences, 2 * size + rope_size);
  const auto data = [](const at::Tensor& tensor) {
    return tensor.template mutable_data_ptr<Input>();
  };
  Input* d_query = data(std::get<0>(outputs));
  Input* d_key = data(std::get<1>(outputs));
  Input* d_value = data(std::get<2>(outputs));
  Input* d_query_rope = data(std::get<3>(outputs));
  Input* d_key_rope = data(std::get<4>(outputs));
  const T* softmax_max = forward.softmax_max.const_data_ptr<T>();
  const T* softmax_sum = forward.softmax_sum.const_data_ptr<T>();

  for (const auto& sequence : inputs.sequences) {
    const SequenceInputs<Input> rows(inputs, sequence);
    const TokenRows<Input> d_out(forward.d_out, sequence.query_begin);
    const TokenRows<Input> out(forward.out, sequence.query_begin);
    const auto factor = static_cast<T>(scale);
    add_tokens(
        sequence, [&] { return std::make_unique<Worker>(inputs, scale); },
        [&](Worker& worker, RowSums<T>& sums, int64_t token) {
          const int64_t row = (sequence.query_begin + token) * heads;
          worker.token(rows, d_out, out, softmax_max + row, softmax_sum + row, token,
                       d_query + row * size, d_query_rope + row * rope_size, sums);
        },
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
  const SparseAttentionInputs inputs(op, Selectable::keys_of_sequence);
  const ForwardResults forward{with_dense_rows(op.d_out), with_dense_rows(op.out),
                               op.softmax_max.contiguous(), op.softmax_sum.contiguous()};
  const auto& [d_query, d_key, d_value, d_query_rope, d_key_rope] = outputs;
  for (const auto& output : {d_query, d_query_rope}) {
    zero_unused_queries(output, token_count(inputs.query), inputs.sequences);
  }
  for (const auto& output : {d_key, d_value, d_key_rope}) {
    zero_unused_keys(output, token_count(inputs.key), inputs.sequences);
  }
  dispatch_operand(d_query.scalar_type(), [&]<typename Input, typename Operand>() {
    differentiate<Input, Operand>(inputs, forward, op.options.scale_value, outputs);
  });
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<SparseFlashAttentionGrad, sparse_flash_attention_grad>(m);
}

}  // namespace
}  // namespace ascend_attn::cpu
