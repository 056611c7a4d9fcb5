#include "ops/flash_attention_score.h"

#include <torch/library.h>

#include <algorithm>

#include "cpu/common/attention_rows.h"
#include "dispatch/operator.h"

namespace ascend_attn::cpu {
namespace {

template <typename Input, typename T>
class ScoreOutputs {
 public:
  ScoreOutputs(const DenseAttention& attention, const FlashAttentionScore::Outputs& outputs)
      : attention_(attention),
        out_(attention.by_head(std::get<0>(outputs), attention.heads)),
        out_data_(out_.mutable_data_ptr<Input>()),
        max_data_(std::get<1>(outputs).template mutable_data_ptr<T>()),
        sum_data_(std::get<2>(outputs).template mutable_data_ptr<T>()) {}

  void store(const DenseSequence& sequence, int64_t head, int64_t query,
             const RowResult<T>& result) const {
    const HeadRows<Input> out(out_data_, out_, sequence.batch, head, sequence.query_begin);
    T row_max = result.max;
    T row_sum = result.sum;
    if (row_sum == 0) {
      std::fill_n(out.row(query), attention_.value_size, Input(0));
      // As on the device: such a row has a maximum and a sum, unless the sequence has no keys.
      row_max = sequence.keys > 0 ? kLowest<T> : T(0);
      row_sum = -row_max;
    } else {
      scale(result.out, T(1) / row_sum, out.row(query), attention_.value_size);
    }
    const int64_t at = kStatisticsLanes * attention_.statistics_row(sequence, head, query);
    std::fill_n(max_data_ + at, kStatisticsLanes, row_max);
    std::fill_n(sum_data_ + at, kStatisticsLanes, row_sum);
  }

 private:
  const DenseAttention& attention_;
  at::Tensor out_;
  Input* out_data_;
  T* max_data_;
  T* sum_data_;
};

void flash_attention_score(const FlashAttentionScore& op, FlashAttentionScore::Outputs& outputs) {
  const DenseAttention attention(op);
  if (attention.layout == Layout::TND) {
    for (const auto& output : {std::get<0>(outputs), std::get<1>(outputs), std::get<2>(outputs)}) {
      zero_unused_queries(output, output.size(0), attention.sequences);
    }
  }
  dispatch_operand(op.query.scalar_type(), [&]<typename Input, typename Operand>() {
    const ScoreOutputs<Input, Accumulator<Operand>> rows(attention, outputs);
    attend_rows<Input, Operand>(attention,
                                [&rows](const auto&... arguments) { rows.store(arguments...); });
  });
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) {
  register_kernel<FlashAttentionScore, flash_attention_score>(m);
}

}  // namespace
}  // namespace ascend_attn::cpu
