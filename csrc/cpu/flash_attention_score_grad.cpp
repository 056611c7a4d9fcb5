// Processes one block of keys at a time. The gradients of its keys and values are then complete,
// while those of the queries accumulate over the blocks in fp32.
#include "ops/flash_attention_score.h"

#include <ATen/ExpandUtils.h>
#include <torch/library.h>

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "core/tensor_checks.h"
#include "cpu/common/dense_attention_grad.h"
#include "cpu/common/parallel_tasks.h"
#include "dispatch/operator.h"

namespace ascend_attn::cpu {
namespace {

// Key heads are split into parts if there are fewer of them than threads: a part takes every
// parts-th block of keys.
struct KeysTask {
  const DenseSequence* sequence;
  int64_t key_head;
  int64_t part;
  int64_t head_index;  // of (sequence, key head)
  int64_t cost;
};

// The query gradients of one key head, one per part. The last part to finish sums them, in order.
template <typename T>
struct QueryGradients {
  std::vector<Tile<T>> parts;
  std::atomic<int64_t> missing;
};

// The gradients of a call, in its layout; undefined for what is absent or not wanted.
struct DenseGradients {
  at::Tensor dq, dk, dv;
  at::Tensor dsink = {}, dq_rope = {}, dk_rope = {};
  at::Tensor dpse = {};  // of every head, in the dtype of the statistics
};

template <typename Input, typename Operand>
class FlashAttentionGrad {
 public:
  using T = Accumulator<Operand>;

  FlashAttentionGrad(const DenseAttentionGrad& attention, const DenseGradients& gradients)
      : tile_(attention),
        attention_(attention.forward),
        dq_tensor_(attention_.by_head(gradients.dq, attention_.heads)),
        dk_tensor_(attention_.by_head(gradients.dk, attention_.key_heads)),
        dv_tensor_(attention_.by_head(gradients.dv, attention_.key_heads)) {
    if (gradients.dpse.defined()) {
      dpse_ = gradients.dpse.mutable_data_ptr<T>();
      dpse_address_ = PseAddress::of(gradients.dpse, attention_.query, attention_.key,
                                     attention_.layout == Layout::TND, attention_.sequences);
    }
    if (gradients.dq_rope.defined()) {
      dq_rope_tensor_ = attention_.by_head(gradients.dq_rope, attention_.heads);
      dk_rope_tensor_ = attention_.by_head(gradients.dk_rope, attention_.key_heads);
    }
  }

  // `sink_sums`: the gradients of the sinks of one sequence, by query head.
  void run(const KeysTask& task, QueryGradients<T>& dq, double* sink_sums) {
    const auto& sequence = *task.sequence;
    const auto parts = static_cast<int64_t>(dq.parts.size());
    tile_.start(sequence, task.key_head);
    // Without any key, the statistics are 0 and do not include the sink.
    if (attention_.sink.defined() && task.part == 0 && sequence.keys > 0) {
      tile_.add_sink_gradients(sink_sums + tile_.first_head());
    }
    auto& own_dq = dq.parts[task.part];
    own_dq =
        Tile<T>(round_up(sequence.queries * attention_.group(), kRowBlock), tile_.keys().size());
    for (int64_t begin = task.part * kKeyBlock; begin < sequence.keys; begin += parts * kKeyBlock) {
      add_keys(task, begin, std::min(kKeyBlock, sequence.keys - begin), own_dq);
    }
    if (--dq.missing == 0) {
      store_queries(task, dq);
    }
  }

 private:
  void add_keys(const KeysTask& task, int64_t begin, int64_t count, const Tile<T>& dq) {
    zero_rows(dk_, 0, tile_.keys().size());
    zero_rows(dv_, 0, tile_.values().size());
    tile_.for_each_tile(begin, count, [&](const ScoreTile& tile) {
      add_products(tile, dq);
      if (dpse_ != nullptr) {
        add_to_pse(tile);
      }
    });
    store_keys(dv_, 0, T(1), dv_tensor_, task, begin, count);
    const auto scale = static_cast<T>(attention_.scale);
    store_keys(dk_, 0, scale, dk_tensor_, task, begin, count);
    if (dk_rope_tensor_.defined()) {
      store_keys(dk_, dk_tensor_.size(-1), scale, dk_rope_tensor_, task, begin, count);
    }
  }

  // dv^T += dy^T * P, dk^T += q^T * dS, dq += dS * k
  void add_products(const ScoreTile& tile, const Tile<T>& dq) {
    const int64_t rows = round_up(tile.rows, kRowStep);
    multiply_rows(tile_.d_out(), tile_.values().size(),
                  as_operand(tile_.probabilities(), rows, tile, rounded_), tile, dv_);
    const auto d_scores = as_operand(tile_.d_scores(), rows, tile, rounded_);
    multiply_rows(tile_.query(), tile_.keys().size(), d_scores, tile, dk_);
    tile_gemm({rows, tile_.keys().size(), tile.width(), d_scores, tile_.keys().by_rows(tile.begin),
               dq.from(tile.first_row), true});
  }

  void add_to_pse(const ScoreTile& tile) {
    tile.for_each_kept_row(tile_.first_head(), [&](int64_t head, int64_t query, int64_t r) {
      const int64_t begin = tile.row_begin[r];
      T* sum = dpse_ + dpse_address_.row(tile.sequence, head, query) + tile.key_begin;
      add(tile_.d_scores().row(r) + begin, sum + begin, tile.row_end[r] - begin);
    });
  }

  // sum^T += from^T * operand
  void multiply_rows(const Tile<Operand>& from, int64_t size, const Matrix<const Operand>& operand,
                     const ScoreTile& tile, const Tile<T>& sum) {
    const int64_t rows = round_up(tile.rows, kRowStep);
    transpose(from, rows, size, transposed_.from(0));
    tile_gemm({size, tile.width(), rows, transposed_.from(0),
               operand_b(rows, tile.width(), operand, packed_), sum.from(0, tile.begin), true});
  }

  // Stores the part of heads that begins at row `first_row` of the transposed sums.
  void store_keys(const Tile<T>& transposed, int64_t first_row, T factor,
                  const at::Tensor& gradient, const KeysTask& task, int64_t begin, int64_t count) {
    const int64_t size = gradient.size(-1);
    const auto& sequence = *task.sequence;
    const HeadRows<Input> rows(gradient.mutable_data_ptr<Input>(), gradient, sequence.batch,
                               task.key_head, sequence.key_begin + begin);
    for (int64_t first = 0; first < count; first += kRowBlock) {
      const int64_t end = std::min(first + kRowBlock, count);
      transpose(transposed.from(first_row, first), size, end - first, by_key_.from(0));
      for (int64_t j = first; j < end; ++j) {
        scale(by_key_.row(j - first), factor, rows.row(j), size);
      }
    }
  }

  void store_queries(const KeysTask& task, QueryGradients<T>& dq) {
    const int64_t group = attention_.group();
    const auto factor = static_cast<T>(attention_.scale);
    const auto rows = gradient_rows(dq_tensor_, task);
    const auto ropes = dq_rope_tensor_.defined()
                           ? std::optional(gradient_rows(dq_rope_tensor_, task))
                           : std::nullopt;
    const int64_t size = dq_tensor_.size(-1);
    const auto& sum = dq.parts.front();
    for (int64_t row = 0; row < task.sequence->queries * group; ++row) {
      for (size_t part = 1; part < dq.parts.size(); ++part) {
        add(dq.parts[part].row(row), sum.row(row), attention_.size);
      }
      scale(sum.row(row), factor, rows.row(row / group, row % group), size);
      if (ropes) {
        scale(sum.row(row) + size, factor, ropes->row(row / group, row % group),
              attention_.size - size);
      }
    }
    dq.parts.clear();
  }

  HeadRows<Input> gradient_rows(const at::Tensor& gradient, const KeysTask& task) const {
    const auto& sequence = *task.sequence;
    return {gradient.mutable_data_ptr<Input>(), gradient, sequence.batch,
            task.key_head * attention_.group(), sequence.query_begin};
  }

  ScoreGradient<Input, Operand> tile_;
  const DenseAttention& attention_;
  T* dpse_ = nullptr;
  PseAddress dpse_address_;
  at::Tensor dq_tensor_, dk_tensor_, dv_tensor_;
  at::Tensor dq_rope_tensor_, dk_rope_tensor_;  // undefined if absent
  Tile<Operand> transposed_{std::max(tile_.keys().size(), tile_.values().size()), kRowBlock};
  Tile<Operand> packed_{kRowBlock, kKeyBlock};
  Tile<Operand> rounded_{kRowBlock, kKeyBlock};
  Tile<T> by_key_{kRowBlock, std::max(tile_.keys().size(), tile_.values().size())};
  Tile<T> dk_{tile_.keys().size(), kKeyBlock};    // (size, keys)
  Tile<T> dv_{tile_.values().size(), kKeyBlock};  // (value size, keys)
};

template <typename Input, typename Operand>
void differentiate_as(const DenseAttentionGrad& attention, const DenseGradients& gradients) {
  using T = Accumulator<Operand>;
  using Worker = FlashAttentionGrad<Input, Operand>;
  const auto& forward = attention.forward;
  const auto heads = static_cast<int64_t>(forward.sequences.size()) * forward.key_heads;
  if (heads == 0) {
    if (gradients.dsink.defined()) {
      gradients.dsink.zero_();
    }
    return;
  }
  const bool of_pse = gradients.dpse.defined();
  const int64_t wanted = of_pse ? 1 : at::divup(2 * at::get_num_threads(), heads);
  std::vector<QueryGradients<T>> dq(heads);
  const auto sequences = static_cast<int64_t>(forward.sequences.size());
  std::vector<double> sink_sums(forward.sink.defined() ? sequences * forward.heads : 0);
  std::vector<KeysTask> tasks;
  for (const auto& sequence : forward.sequences) {
    const int64_t blocks = std::max<int64_t>(at::divup(sequence.keys, kKeyBlock), 1);
    const int64_t parts = std::min(wanted, blocks);
    for (int64_t head = 0; head < forward.key_heads; ++head) {
      const int64_t index = sequence.index * forward.key_heads + head;
      dq[index].parts.resize(parts);
      dq[index].missing = parts;
      for (int64_t part = 0; part < parts; ++part) {
        tasks.push_back({&sequence, head, part, index, sequence.queries * sequence.keys / parts});
      }
    }
  }
  const auto make_worker = [&] { return std::make_unique<Worker>(attention, gradients); };
  const auto run = [&](Worker& worker, const KeysTask& task) {
    double* sums =
        sink_sums.empty() ? nullptr : sink_sums.data() + task.sequence->index * forward.heads;
    worker.run(task, dq[task.head_index], sums);
  };
  if (of_pse) {
    // Sequences may share the rows of a bias, but the query heads of a key head have theirs alone.
    std::vector<KeysTask> first_tasks(tasks.begin(), tasks.begin() + forward.key_heads);
    for_each_task(first_tasks, make_worker, [&](Worker& worker, const KeysTask& first) {
      for (const auto& task : tasks) {
        if (task.key_head == first.key_head) {
          run(worker, task);
        }
      }
    });
  } else {
    for_each_task(tasks, make_worker, run);
  }
  for (int64_t head = 0; gradients.dsink.defined() && head < forward.heads; ++head) {
    double sum = 0;
    for (int64_t sequence = 0; sequence < sequences; ++sequence) {
      sum += sink_sums[sequence * forward.heads + head];
    }
    gradients.dsink.mutable_data_ptr<T>()[head] = static_cast<T>(sum);
  }
}

void differentiate(const DenseAttentionGrad& attention, const DenseGradients& gradients) {
  if (attention.forward.layout == Layout::TND) {
    const auto zero_unused = [&](const at::Tensor& tensor, int64_t Sequence::* tokens) {
      const int64_t count = tensor.defined() ? tensor.size(0) : 0;
      zero_unused_tokens(tensor, count, attention.forward.sequences, tokens);
    };
    zero_unused(gradients.dq, &Sequence::queries);
    zero_unused(gradients.dq_rope, &Sequence::queries);
    zero_unused(gradients.dk, &Sequence::keys);
    zero_unused(gradients.dv, &Sequence::keys);
    zero_unused(gradients.dk_rope, &Sequence::keys);
  }
  const auto fill_padding = [&](const at::Tensor& gradient, int64_t heads,
                                int64_t Sequence::* tokens) {
    if (gradient.defined()) {
      attention.forward.fill_padding(attention.forward.by_head(gradient, heads), 0, tokens);
    }
  };
  for (const auto& gradient : {gradients.dq, gradients.dq_rope}) {
    fill_padding(gradient, attention.forward.heads, &Sequence::queries);
  }
  for (const auto& gradient : {gradients.dk, gradients.dv, gradients.dk_rope}) {
    fill_padding(gradient, attention.forward.key_heads, &Sequence::keys);
  }
  dispatch_operand(attention.forward.query.scalar_type(), [&]<typename Input, typename Operand>() {
    differentiate_as<Input, Operand>(attention, gradients);
  });
}

// Returns zeros for the gradient of a bias, with an axis for the heads that share it.
at::Tensor gradient_of_heads(const at::Tensor& pse, const DenseAttention& attention) {
  auto sizes = pse.sizes().vec();
  if (pse.dim() == 4) {
    sizes[1] = attention.heads;
  }
  return pse.new_zeros(sizes, statistics_dtype(attention.query));
}

void flash_attention_score_grad(const FlashAttentionScoreGrad& op,
                                FlashAttentionScoreGrad::Outputs& outputs) {
  const auto& [dq, dk, dv] = outputs;
  differentiate(DenseAttentionGrad(op), {.dq = dq, .dk = dk, .dv = dv});
}

void flash_attention_score_extended_grad(const FlashAttentionScoreExtendedGrad& op,
                                         FlashAttentionScoreExtendedGrad::Outputs& outputs) {
  const auto& [dq, dk, dv, d_sink, dq_rope, dk_rope, d_pse] = outputs;
  const DenseAttentionGrad attention(op);
  DenseGradients gradients{.dq = dq, .dk = dk, .dv = dv};
  if (op.extra.sink) {
    gradients.dsink = d_sink;
  }
  if (op.extra.query_rope) {
    gradients.dq_rope = dq_rope;
    gradients.dk_rope = dk_rope;
  }
  if (op.pse_grad) {
    gradients.dpse = gradient_of_heads(*op.options.pse_shift, attention.forward);
  }
  differentiate(attention, gradients);
  if (op.pse_grad) {
    // With pse_type 1 the scale applies to pse_shift too, and so to its gradient.
    const auto scaled =
        gradients.dpse.mul(op.options.pse_type == 1 ? attention.forward.scale : 1.0);
    d_pse.copy_(at::sum_to(scaled, d_pse.sizes()));
  }
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<FlashAttentionScoreGrad, flash_attention_score_grad>(m);
  register_kernel<FlashAttentionScoreExtendedGrad, flash_attention_score_extended_grad>(m);
}

}  // namespace
}  // namespace ascend_attn::cpu

void ascend_attn::FlashAttentionScoreGrad::check_values() const {
  const cpu::DenseAttention checked(*this);
}

void ascend_attn::FlashAttentionScoreExtendedGrad::check_values() const {
  const cpu::DenseAttention checked(*this);
}
