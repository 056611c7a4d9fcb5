#include "ops/flash_attention_score.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "core/error.h"
#include "core/sparse_mode.h"
#include "npu/aclnn/product.h"
#include "npu/kernel.h"
#include "npu/sink_and_ropes.h"

namespace ascend_attn::aclnn {
namespace {

// The functions for layout TND also take the lengths and are otherwise the same.
template <typename... Lengths>
using ScorePrototype = int(AclTensor query, AclTensor key, AclTensor value, AclTensor real_shift,
                           AclTensor drop_mask, AclTensor padding_mask, AclTensor atten_mask,
                           AclIntArray prefix, Lengths... actual_seq_q_len_and_kv_len,
                           AclIntArray q_start_idx, AclIntArray kv_start_idx, double scale_value,
                           double keep_prob, int64_t pre_tokens, int64_t next_tokens,
                           int64_t head_num, char* input_layout, int64_t inner_precise,
                           int64_t sparse_mode, int64_t pse_type, AclTensor softmax_max,
                           AclTensor softmax_sum, AclTensor softmax_out, AclTensor attention_out);

template <typename... Lengths>
using ScoreGradPrototype = int(AclTensor query, AclTensor key, AclTensor value, AclTensor dy,
                               AclTensor pse_shift, AclTensor drop_mask, AclTensor padding_mask,
                               AclTensor atten_mask, AclTensor softmax_max, AclTensor softmax_sum,
                               AclTensor softmax_in, AclTensor attention_in, AclIntArray prefix,
                               Lengths... actual_seq_q_len_and_kv_len, AclIntArray q_start_idx,
                               AclIntArray kv_start_idx, double scale_value, double keep_prob,
                               int64_t pre_tokens, int64_t next_tokens, int64_t head_num,
                               char* input_layout, int64_t inner_precise, int64_t sparse_mode,
                               int64_t pse_type, AclTensor dq, AclTensor dk, AclTensor dv,
                               AclTensor dpse);

constexpr Launcher<FlashAttentionScore, ScorePrototype<>, 0> aclnn_score{.reuses_executor = true};
constexpr Launcher<FlashAttentionScore, ScorePrototype<AclIntArray, AclIntArray>, 1>
    aclnn_packed_score{.reuses_executor = true};
constexpr Launcher<FlashAttentionScoreGrad, ScoreGradPrototype<>, 0> aclnn_score_grad{
    .reuses_executor = true};
constexpr Launcher<FlashAttentionScoreGrad, ScoreGradPrototype<AclIntArray, AclIntArray>, 1>
    aclnn_packed_score_grad{.reuses_executor = true};

// The device computes the band in int32 and wraps around. Beyond that range a number bounds
// nothing.
int64_t within_int32(int64_t tokens) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  return std::clamp(tokens, -kMax, kMax);
}

// The lists of a call, on the host.
struct Lists {
  Lists(const at::Tensor& query, const at::Tensor& key, const FlashAttentionOptions& options);

  IntegerList prefix, query_ends, key_ends;

 private:
  void mark_padding(const at::Tensor& query, const at::Tensor& key,
                    const FlashAttentionOptions& options);
};

Lists::Lists(const at::Tensor& query, const at::Tensor& key, const FlashAttentionOptions& options)
    : prefix(integers_of(options.prefix)) {
  if (options.layout == Layout::TND) {
    query_ends = integers_of(options.actual_seq_lengths_query);
    key_ends = integers_of(options.actual_seq_lengths_key);
    mark_padding(query, key, options);
  }
}

// A pack with tokens behind its sequences, of queries and of keys: from CANN 9.0 on A2 and A3 want
// one more element in both lists, which is 0. It counts as a sequence, so that `prefix` has one
// more too. Slopes and masks of every batch would need another row: with those the caller adds the
// 0.
void Lists::mark_padding(const at::Tensor& query, const at::Tensor& key,
                         const FlashAttentionOptions& options) {
  static const bool wanted = runs_on(kA2A3.since(Cann::v9_0));
  const auto per_batch = [](const std::optional<at::Tensor>& tensor, int64_t rank) {
    return tensor && tensor->dim() == rank && tensor->size(0) > 1;
  };
  if (per_batch(options.pse_shift, 2) || per_batch(options.atten_mask, 4)) {
    return;
  }
  const auto padded = [](const at::Tensor& tokens, const IntegerList& ends) {
    return !ends.empty() && ends.back() != 0 && tokens.size(0) > ends.back();
  };
  if (wanted && padded(query, query_ends) && padded(key, key_ends)) {
    query_ends.push_back(0);
    key_ends.push_back(0);
    if (!prefix.empty()) {
      prefix.push_back(0);
    }
  }
}

int64_t sum_of(const IntegerList& ends) {
  return ends.empty() ? 0 : *std::ranges::max_element(ends);
}

// The position of each token in its sequence, for sequences that lie one behind the other. Made on
// the device: a graph would copy from memory of the host again in every replay.
at::Tensor positions_of(const IntegerList& ends, const at::TensorOptions& options) {
  std::vector<at::Tensor> positions;
  int64_t begin = 0;
  for (const auto end : ends) {
    if (end > begin) {
      positions.push_back(at::arange(end - begin, options));
      begin = end;
    }
  }
  return at::cat(positions);
}

// In sparse_mode 0 the device leaves out whole tiles by pre_tokens and next_tokens, and within a
// tile it keeps what the mask keeps: the mask has to hold the band too.
template <typename Op>
std::optional<at::Tensor> mask_with_band(const Op& op, const Lists& lists) {
  const auto& o = op.options;
  if (!o.atten_mask || o.sparse_mode != static_cast<int64_t>(SparseMode::standard)) {
    return o.atten_mask;
  }
  const auto& mask = *o.atten_mask;
  const auto queries = mask.size(-2);
  const auto keys = mask.size(-1);
  if (mask.numel() == 0 || (o.pre_tokens >= queries - 1 && o.next_tokens >= keys - 1)) {
    return mask;
  }
  check_implemented(GivenWorkspace::current() == nullptr, op.name, "atten_mask",
                    "expected pre_tokens and next_tokens that exclude nothing beside the mask of a "
                    "call whose lengths a graph updates, got ",
                    o.pre_tokens, " and ", o.next_tokens, "; put what they exclude into the mask");
  // A mask of (sum Sq, sum Skv) has the scores of every sequence on its diagonal; all others are
  // counted from the first token of a sequence.
  const bool of_pack = o.layout == Layout::TND && mask.dim() == 2 &&
                       queries == sum_of(lists.query_ends) && keys == sum_of(lists.key_ends);
  const auto integers = mask.options().dtype(at::kInt);
  const auto positions = [&](int64_t count, const IntegerList& ends) {
    return of_pack ? positions_of(ends, integers) : at::arange(count, integers);
  };
  const auto rows = positions(queries, lists.query_ends).unsqueeze(-1);
  const auto columns = positions(keys, lists.key_ends);
  const auto behind = columns < rows - std::clamp(o.pre_tokens, -keys, queries);
  const auto ahead = columns > rows + std::clamp(o.next_tokens, -queries, keys);
  return mask.logical_or(behind.logical_or(ahead)).view(mask.scalar_type());
}

// The mask that the device gets.
template <typename Op>
std::optional<at::Tensor> mask_of(const Op& op, const Lists& lists) {
  auto mask = mask_with_band(op, lists);
  const auto batches = static_cast<int64_t>(lists.query_ends.size());
  // The 0 that marks padding makes two sequences of one, and a mask of all heads wants both.
  if (batches != 2 || !mask || mask->dim() != 4 || mask->size(0) != 1 || mask->size(1) == 1) {
    return mask;
  }
  check_implemented(GivenWorkspace::current() == nullptr, op.name, "atten_mask",
                    "expected a mask that all heads share, as a graph updates the lengths of a "
                    "padded pack, got ",
                    mask->sizes());
  return mask->expand({batches, -1, -1, -1}).contiguous();
}

// Refuses calls of a graph that updates lengths, where the launch computes more than CANN does.
void check_not_updated(const char* op, const char* argument) {
  check_implemented(GivenWorkspace::current() == nullptr, op, argument,
                    "expected None on this device in a call whose lengths a graph updates, got a "
                    "tensor");
}

std::vector<int64_t> cumulative(const IntegerList& ends) { return {ends.begin(), ends.end()}; }

void launch(const FlashAttentionScore& op, const FlashAttentionScore::Outputs& outputs) {
  const auto& [out, softmax_max, softmax_sum] = outputs;
  const auto& o = op.options;
  const Lists lists(op.query, op.key, o);
  const auto atten_mask = mask_of(op, lists);
  // Never written: the function reserves this output.
  const auto softmax_out = new_tensor({0}, op.query.options());
  const auto call = [&](const auto& function, const auto&... lengths) {
    function(op.query, op.key, op.value, o.pse_shift, o.drop_mask, std::nullopt, atten_mask,
             lists.prefix, lengths..., o.q_start_idx, o.kv_start_idx, o.scale_value, o.keep_prob,
             within_int32(o.pre_tokens), within_int32(o.next_tokens), o.num_heads.expect_int(),
             o.layout.text(), o.inner_precise, o.sparse_mode, o.pse_type, softmax_max, softmax_sum,
             softmax_out, out);
  };
  if (o.layout == Layout::TND) {
    call(aclnn_packed_score, lists.query_ends, lists.key_ends);
  } else {
    call(aclnn_score);
  }
}

void flash_attention_score(const FlashAttentionScore& op, FlashAttentionScore::Outputs& outputs) {
  if (op.extra.query_rope) {
    check_not_updated(op.name, "query_rope");
    launch(join_ropes(op), outputs);
  } else {
    launch(op, outputs);
  }
  if (op.extra.sink) {
    check_not_updated(op.name, "sink");
    const Lists lists(op.query, op.key, op.options);
    add_sink(op, outputs, cumulative(lists.query_ends));
  }
}

void launch_grad(const FlashAttentionScoreGrad& op,
                 const FlashAttentionScoreGrad::Outputs& outputs) {
  const auto& [dq, dk, dv] = outputs;
  const auto& o = op.options;
  const Lists lists(op.query, op.key, o);
  const auto atten_mask = mask_of(op, lists);
  // Never written, since the function has no gradient of pse_shift; torch_npu passes its sizes as
  // well.
  const auto dpse = o.pse_shift ? new_like(*o.pse_shift) : new_tensor({0}, op.query.options());
  const auto call = [&](const auto& function, const auto&... lengths) {
    function(op.query, op.key, op.value, op.dy, o.pse_shift, o.drop_mask, std::nullopt, atten_mask,
             op.softmax_max, op.softmax_sum, std::nullopt, op.attention_in, lists.prefix,
             lengths..., o.q_start_idx, o.kv_start_idx, o.scale_value, o.keep_prob,
             within_int32(o.pre_tokens), within_int32(o.next_tokens), o.num_heads.expect_int(),
             o.layout.text(), o.inner_precise, o.sparse_mode, o.pse_type, dq, dk, dv, dpse);
  };
  if (o.layout == Layout::TND) {
    call(aclnn_packed_score_grad, lists.query_ends, lists.key_ends);
  } else {
    call(aclnn_score_grad);
  }
}

constexpr int64_t kKeySize = 192;
constexpr int64_t kValueSize = 128;

// Returns whether CANN's host code refuses the gradient in this layout. Values of 128 beside keys
// of 192 are the one pair that it does not pad. Where rows are long it transposes values with the
// head size of the keys, which fails; in BNSD there is nothing to transpose.
bool is_refused_unless_bnsd(const FlashAttentionScoreGrad& op) {
  constexpr int64_t kFewestHeads = 256;
  static const bool refuses = runs_on(kA2A3);
  const auto layout = op.options.layout.value();
  if (!refuses || layout == Layout::BNSD || layout == Layout::TND || is_deterministic(false)) {
    return false;
  }
  const auto axes = axes_of(layout);
  const auto heads = op.options.num_heads.expect_int();
  if (heads * (layout == Layout::SBH ? op.query.size(axes.batch) : 1) < kFewestHeads) {
    return false;
  }
  const auto size_of_head = [&](const at::Tensor& tensor) {
    return axes.merged() ? tensor.size(-1) / heads : tensor.size(-1);
  };
  return size_of_head(op.query) == kKeySize && size_of_head(op.dy) == kValueSize;
}

void flash_attention_score_grad_in_bnsd(const FlashAttentionScoreGrad& op,
                                        FlashAttentionScoreGrad::Outputs& outputs) {
  const auto layout = op.options.layout.value();
  const auto heads = op.options.num_heads.expect_int();
  const auto key_heads = key_heads_of(op.query, op.key, layout, heads);
  auto bnsd = op;
  bnsd.options.layout = LayoutArgument("BNSD");
  for (auto* tensor : {&bnsd.query, &bnsd.dy, &bnsd.attention_in}) {
    *tensor = as_bnsd(*tensor, layout, heads).contiguous();
  }
  for (auto* tensor : {&bnsd.key, &bnsd.value}) {
    *tensor = as_bnsd(*tensor, layout, key_heads).contiguous();
  }
  auto gradients = bnsd.check_and_allocate();
  launch_grad(bnsd, gradients);
  const auto& [dq, dk, dv] = outputs;
  as_bnsd(dq, layout, heads).copy_(std::get<0>(gradients));
  as_bnsd(dk, layout, key_heads).copy_(std::get<1>(gradients));
  as_bnsd(dv, layout, key_heads).copy_(std::get<2>(gradients));
}

void flash_attention_score_grad(const FlashAttentionScoreGrad& op,
                                FlashAttentionScoreGrad::Outputs& outputs) {
  if (is_refused_unless_bnsd(op)) {
    flash_attention_score_grad_in_bnsd(op, outputs);
  } else {
    launch_grad(op, outputs);
  }
}

void flash_attention_score_extended_grad(const FlashAttentionScoreExtendedGrad& op,
                                         FlashAttentionScoreExtendedGrad::Outputs& outputs) {
  if (op.extra.query_rope) {
    check_not_updated(op.name, "query_rope");
    differentiate_joined(op, outputs, flash_attention_score_grad);
  } else {
    FlashAttentionScoreGrad::Outputs gradients{std::get<0>(outputs), std::get<1>(outputs),
                                               std::get<2>(outputs)};
    flash_attention_score_grad(FlashAttentionScoreGrad{op.without_extra()}, gradients);
  }
  if (op.extra.sink) {
    check_not_updated(op.name, "sink");
    const Lists lists(op.query, op.key, op.options);
    differentiate_sink(op, std::get<3>(outputs), cumulative(lists.query_ends));
  }
}

const Registration npu(c10::DispatchKey::PrivateUse1, [](torch::Library& m) {
  register_kernel_and_relaunch<FlashAttentionScore, flash_attention_score>(m);
  register_kernel_and_relaunch<FlashAttentionScoreGrad, flash_attention_score_grad>(m);
  register_kernel_and_relaunch<FlashAttentionScoreExtendedGrad,
                               flash_attention_score_extended_grad>(m);
});

}  // namespace
}  // namespace ascend_attn::aclnn
