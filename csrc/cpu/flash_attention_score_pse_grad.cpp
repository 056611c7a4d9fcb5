// The gradient of pse_shift, summed over the axes along which it is broadcast.
#include "ops/flash_attention_score.h"

#include <memory>
#include <vector>

#include "core/tensor_checks.h"
#include "cpu/common/dense_attention_grad.h"
#include "cpu/common/parallel_tasks.h"
#include "dispatch/operator.h"
#include "dispatch/registration.h"

namespace ascend_attn::cpu {
namespace {

// All rows of one key head in all sequences. Its query heads have rows of the sum to themselves, so
// that tasks do not share any.
struct HeadTask {
  int64_t key_head;
  int64_t cost;
};

template <typename Input, typename Operand>
class PseGrad {
 public:
  using T = Accumulator<Operand>;

  PseGrad(const DenseAttentionGrad& attention, const PseAddress& address, T* sum)
      : attention_(attention.forward), address_(address), sum_(sum), tile_(attention) {}

  void run(const HeadTask& task) {
    for (const auto& sequence : attention_.sequences) {
      tile_.start(sequence, task.key_head);
      for (int64_t begin = 0; begin < sequence.keys; begin += kKeyBlock) {
        tile_.for_each_tile(begin, std::min(kKeyBlock, sequence.keys - begin),
                            [&](const ScoreTile& tile) { add_rows(tile); });
      }
    }
  }

 private:
  void add_rows(const ScoreTile& tile) {
    tile.for_each_kept_row(tile_.first_head(), [&](int64_t head, int64_t query, int64_t r) {
      const int64_t begin = tile.row_begin[r];
      add(tile_.d_scores().row(r) + begin,
          sum_ + address_.row(tile.sequence, head, query) + tile.key_begin + begin,
          tile.row_end[r] - begin);
    });
  }

  const DenseAttention& attention_;
  const PseAddress& address_;
  T* sum_;
  ScoreGradient<Input, Operand> tile_;
};

void flash_attention_pse_grad(const FlashAttentionPseGrad& op,
                              FlashAttentionPseGrad::Outputs& outputs) {
  const DenseAttentionGrad attention(op);
  const auto& forward = attention.forward;
  const auto& pse = *op.options.pse_shift;
  const bool shared = pse.dim() == 4 && pse.size(1) == 1 && forward.heads > 1;
  auto sizes = pse.sizes().vec();
  if (shared) {
    sizes[1] = forward.heads;
  }
  const auto sum = pse.new_zeros(sizes, statistics_dtype(op.query));
  const auto address = PseAddress::of(sum, forward.query, forward.key,
                                      forward.layout == Layout::TND, forward.sequences);
  dispatch_operand(op.query.scalar_type(), [&]<typename Input, typename Operand>() {
    using Worker = PseGrad<Input, Operand>;
    auto* data = sum.template mutable_data_ptr<Accumulator<Operand>>();
    std::vector<HeadTask> tasks;
    for (int64_t head = 0; head < forward.key_heads; ++head) {
      tasks.push_back({head, 0});
    }
    for_each_task(
        tasks, [&] { return std::make_unique<Worker>(attention, address, data); },
        [](Worker& worker, const HeadTask& task) { worker.run(task); });
  });
  // With pse_type 1 the scale applies to pse_shift too, and so to its gradient.
  const double factor = forward.pse_type == 1 ? forward.scale : 1.0;
  const auto d_pse = sum.mul(factor);
  std::get<0>(outputs).copy_(shared ? d_pse.sum(1, /*keepdim=*/true) : d_pse);
}

const Registration kernels(c10::DispatchKey::CPU, [](torch::Library& m) {
  register_kernel<FlashAttentionPseGrad, flash_attention_pse_grad>(m);
});

}  // namespace
}  // namespace ascend_attn::cpu
