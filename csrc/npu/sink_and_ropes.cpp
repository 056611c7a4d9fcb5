#include "npu/sink_and_ropes.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <limits>
#include <vector>

#include "core/error.h"
#include "npu/dense_lists.h"
#include "npu/kernel.h"

namespace ascend_attn::aclnn {
namespace {

// Returns `tensor` with an axis for its heads, which in BSH and SBH share one with the head size.
at::Tensor split_heads(const at::Tensor& tensor, Layout layout, int64_t heads) {
  return axes_of(layout).merged() ? tensor.unflatten(-1, {heads, -1}) : tensor;
}

at::Tensor join(const at::Tensor& tensor, const at::Tensor& rope, Layout layout, int64_t heads) {
  const auto joined =
      at::cat({split_heads(tensor, layout, heads), split_heads(rope, layout, heads)}, -1);
  return axes_of(layout).merged() ? joined.flatten(-2) : joined;
}

void split(const at::Tensor& joined, Layout layout, int64_t heads, const at::Tensor& gradient,
           const at::Tensor& d_rope) {
  const auto from = split_heads(joined, layout, heads);
  const auto to = split_heads(gradient, layout, heads);
  const int64_t size = to.size(-1);
  to.copy_(from.narrow(-1, 0, size));
  split_heads(d_rope, layout, heads).copy_(from.narrow(-1, size, from.size(-1) - size));
}

// The rows of the outputs of a call, in the order in which the statistics have them.
class Rows {
 public:
  Rows(const FlashAttentionOptions& options, const IntegerList& query_ends,
       const at::Tensor& softmax_max)
      : layout_(options.layout.value()), heads_(options.heads().expect_int()) {
    if (layout_ != Layout::TND) {
      return;
    }
    // Sequence after sequence, (N, Sq) of each. Made on the device: a graph would copy from memory
    // of the host again in every replay.
    const auto integers = softmax_max.options().dtype(at::kLong);
    std::vector<at::Tensor> rows{at::arange(0, integers).view({0, heads_})};
    for (const auto end : query_ends) {
      if (end > tokens_) {
        rows.push_back(
            at::arange(tokens_ * heads_, end * heads_, integers).view({heads_, end - tokens_}).t());
        tokens_ = end;
      }
    }
    index_ = at::cat(rows).flatten();
  }

  // Returns a statistic of every row, (B, N, Sq), in TND (T, N) without the tokens behind the last
  // sequence.
  at::Tensor read(const at::Tensor& statistic) const {
    const auto lane = statistic.select(-1, 0);
    return index_.defined() ? lane.flatten().index_select(0, index_).view({tokens_, heads_}) : lane;
  }
  void write(const at::Tensor& values, const at::Tensor& statistic) const {
    if (index_.defined()) {
      statistic.flatten(0, 1).index_copy_(0, index_,
                                          values.view({-1, 1}).expand({-1, kStatisticsLanes}));
    } else {
      statistic.copy_(values.unsqueeze(-1).expand_as(statistic));
    }
  }

  // Returns a view of `tensor` with the axes of `read`, and the head size.
  at::Tensor view(const at::Tensor& tensor) const {
    return index_.defined() ? tensor.narrow(0, 0, tokens_) : as_bnsd(tensor, layout_, heads_);
  }
  // Returns the sink of every row, as it is broadcast to `read`.
  at::Tensor sinks(const at::Tensor& sink) const {
    return index_.defined() ? sink : sink.view({-1, 1});
  }
  at::Tensor sum_by_head(const at::Tensor& rows) const {
    return index_.defined() ? rows.sum(0) : rows.sum(at::IntArrayRef{0, 2});
  }

 private:
  Layout layout_;
  int64_t heads_;
  int64_t tokens_ = 0;
  at::Tensor index_;  // of the row of every token and head: TND alone
};

}  // namespace

int64_t key_heads_of(const at::Tensor& query, const at::Tensor& key, Layout layout, int64_t heads) {
  const auto axes = axes_of(layout);
  return axes.merged() ? key.size(-1) / (query.size(-1) / heads) : key.size(axes.heads);
}

at::Tensor as_bnsd(const at::Tensor& tensor, Layout layout, int64_t heads) {
  const auto axes = axes_of(layout);
  const int64_t head_axis = axes.merged() ? 2 : axes.heads;
  return split_heads(tensor, layout, heads).permute({axes.batch, head_axis, axes.tokens, 3});
}

FlashAttentionScore join_ropes(const FlashAttentionScore& op) {
  auto joined = op;
  const auto layout = op.options.layout.value();
  const auto heads = op.options.heads().expect_int();
  joined.query = join(op.query, *op.extra.query_rope, layout, heads);
  joined.key =
      join(op.key, *op.extra.key_rope, layout, key_heads_of(op.query, op.key, layout, heads));
  joined.extra.query_rope.reset();
  joined.extra.key_rope.reset();
  return joined;
}

void differentiate_joined(const FlashAttentionScoreExtendedGrad& op,
                          const FlashAttentionScoreExtendedGrad::Outputs& outputs,
                          void (*differentiate)(const FlashAttentionScoreExtendedGrad&,
                                                FlashAttentionScoreExtendedGrad::Outputs&)) {
  const auto& [dq, dk, dv, d_sink, dq_rope, dk_rope, d_pse] = outputs;
  const auto layout = op.options.layout.value();
  const auto heads = op.options.heads().expect_int();
  const auto key_heads = key_heads_of(op.query, op.key, layout, heads);
  auto joined = op;
  joined.query = join(op.query, *op.extra.query_rope, layout, heads);
  joined.key = join(op.key, *op.extra.key_rope, layout, key_heads);
  joined.extra.query_rope.reset();
  joined.extra.key_rope.reset();
  FlashAttentionScoreExtendedGrad::Outputs gradients{
      new_like(joined.query), new_like(joined.key), dv, d_sink, dq_rope, dk_rope, d_pse};
  differentiate(joined, gradients);
  split(std::get<0>(gradients), layout, heads, dq, dq_rope);
  split(std::get<1>(gradients), layout, key_heads, dk, dk_rope);
}

void add_sink(const FlashAttentionScore& op, const FlashAttentionScore::Outputs& outputs,
              const IntegerList& query_ends) {
  const auto& [out, softmax_max, softmax_sum] = outputs;
  if (out.numel() == 0) {
    return;
  }
  const Rows rows(op.options, query_ends, softmax_max);
  const auto sink = rows.sinks(*op.extra.sink);
  const auto max = rows.read(softmax_max);
  const auto sum = rows.read(softmax_sum);
  // Sequences without any key keep statistics of 0.
  const auto has_keys = sum != 0;
  const auto new_max = at::where(has_keys, at::maximum(max, sink), max);
  const auto of_keys = sum * at::exp(max - new_max);
  const auto new_sum = at::where(has_keys, of_keys + at::exp(sink - new_max), sum);
  const auto factor = at::where(has_keys, of_keys / new_sum, 1);
  rows.view(out).mul_(factor.unsqueeze(-1));
  rows.write(new_max, softmax_max);
  rows.write(new_sum, softmax_sum);
}

void differentiate_sink(const FlashAttentionScoreExtendedGrad& op, const at::Tensor& d_sink,
                        const IntegerList& query_ends) {
  const Rows rows(op.options, query_ends, op.softmax_max);
  const auto max = rows.read(op.softmax_max);
  const auto sum = rows.read(op.softmax_sum);
  const auto weight = at::where(sum != 0, at::exp(rows.sinks(*op.extra.sink) - max) / sum, 0);
  const auto delta =
      (rows.view(*op.dy).to(at::kFloat) * rows.view(op.attention_in).to(at::kFloat)).sum(-1);
  d_sink.copy_(rows.sum_by_head(weight * delta).neg());
}

FlashAttentionScoreExtendedGrad call_of_statistics(const FlashAttentionScoreExtendedGrad& op) {
  const Rows rows(op.options, DenseLists(op.query, op.key, op.options).query_ends, op.softmax_max);
  // Nothing flows through rows without keys, whose sum is FLT_MAX.
  const auto sum = rows.read(op.softmax_sum);
  const auto d_lse = rows.read(op.d_softmax_sum->sum(-1, /*keepdim=*/true)) *
                     sum.masked_fill(sum == std::numeric_limits<float>::max(), 0);
  auto call = op;
  call.d_softmax_sum.reset();
  call.value = at::zeros_like(op.value);
  call.dy = at::zeros_like(op.attention_in, at::MemoryFormat::Contiguous);
  call.attention_in = at::zeros_like(op.attention_in, at::MemoryFormat::Contiguous);
  rows.view(*call.dy).select(-1, 0).fill_(1);
  rows.view(call.attention_in).select(-1, 0).copy_(d_lse.neg());
  return call;
}

}  // namespace ascend_attn::aclnn
