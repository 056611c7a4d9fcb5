// The gradients of calls with a sink or with ropes.
#include "ops/flash_attention_score.h"

#include <ATen/Parallel.h>

#include "cpu/common/dense_attention_grad.h"
#include "dispatch/operator.h"
#include "dispatch/registration.h"

namespace ascend_attn::cpu {
namespace {

// A sink has the score of a key without a value: its gradient is -P of the sink times the sum of
// P * dP over the keys, which is the dot product of out and its gradient.
template <typename Input, typename T>
double sink_gradient(const DenseAttentionGrad& grad, int64_t head) {
  const auto& attention = grad.forward;
  const T sink = attention.sink.const_data_ptr<T>()[head];
  double sum = 0;
  for (const auto& sequence : attention.sequences) {
    // Without any key, the statistics are 0 and do not include the sink.
    const int64_t queries = sequence.keys > 0 ? sequence.queries : 0;
    const auto d_out = query_rows<Input>(grad.d_out, sequence, head);
    const auto out = query_rows<Input>(grad.out, sequence, head);
    for (int64_t query = 0; query < queries; ++query) {
      const int64_t at = kStatisticsLanes * attention.statistics_row(sequence, head, query);
      const T weight = softmax_weight(sink, grad.softmax_max.const_data_ptr<T>()[at]) /
                       grad.softmax_sum.const_data_ptr<T>()[at];
      const T delta = dot(d_out.row(query), out.row(query), attention.value_size);
      sum -= static_cast<double>(weight) * static_cast<double>(delta);
    }
  }
  return sum;
}

void differentiate_sink(const DenseAttentionGrad& grad, const at::Tensor& d_sink) {
  dispatch_operand(grad.d_out.scalar_type(), [&]<typename Input, typename Operand>() {
    using T = Accumulator<Operand>;
    // One thread sums up a head, so that results do not depend on the thread count.
    at::parallel_for(0, grad.forward.heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t head = begin; head < end; ++head) {
        d_sink.mutable_data_ptr<T>()[head] = static_cast<T>(sink_gradient<Input, T>(grad, head));
      }
    });
  });
}

void flash_attention_score_extended_grad(const FlashAttentionScoreExtendedGrad& op,
                                         FlashAttentionScoreExtendedGrad::Outputs& outputs) {
  const DenseAttentionGrad grad(op);
  const auto& [dq, dk, dv, d_sink, dq_rope, dk_rope] = outputs;
  DenseGradients gradients{.dq = dq, .dk = dk, .dv = dv, .dq_rope = {}, .dk_rope = {}};
  if (op.extra.query_rope) {
    gradients.dq_rope = dq_rope;
    gradients.dk_rope = dk_rope;
  }
  differentiate(grad, gradients);
  if (op.extra.sink) {
    differentiate_sink(grad, d_sink);
  }
}

const Registration kernels(c10::DispatchKey::CPU, [](torch::Library& m) {
  register_kernel<FlashAttentionScoreExtendedGrad, flash_attention_score_extended_grad>(m);
});

}  // namespace
}  // namespace ascend_attn::cpu

void ascend_attn::FlashAttentionScoreExtendedGrad::check_values() const {
  const cpu::DenseAttention checked(*this);
}
