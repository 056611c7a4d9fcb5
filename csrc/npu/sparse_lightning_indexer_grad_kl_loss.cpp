#include "ops/sparse_lightning_indexer_grad_kl_loss.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "core/sparse_mode.h"
#include "npu/absent_ropes.h"
#include "npu/aclnn/product.h"
#include "npu/kernel.h"
#include "npu/packing.h"
#include "ops/sparse_indices.h"

namespace ascend_attn::aclnn {
namespace {

using GradKLLossPrototype = int(AclTensor query, AclTensor key, AclTensor query_index,
                                AclTensor key_index, AclTensor weights, AclTensor sparse_indices,
                                AclTensor softmax_max, AclTensor softmax_sum, AclTensor query_rope,
                                AclTensor key_rope, AclIntArray actual_seq_lengths_query,
                                AclIntArray actual_seq_lengths_key, double scale_value,
                                char* layout, int64_t sparse_mode, int64_t pre_tokens,
                                int64_t next_tokens, bool deterministic, AclTensor d_query_index,
                                AclTensor d_key_index, AclTensor d_weights, AclTensor loss);
constexpr Launcher<SparseLightningIndexerGradKLLoss, GradKLLossPrototype>
    aclnn_sparse_lightning_indexer_grad_kl_loss;

// With an odd number of cores, and more tokens than cores, the deterministic kernel never ends: a
// core waits for a flag that none sets. Devices have an even number, which a stream may limit.
void check_cores(const SparseLightningIndexerGradKLLoss& op) {
  const auto cores = ai_cores_of_stream();
  const auto row = std::max<int64_t>(op.query.size(-2) * op.query.size(-1), 1);
  check_implemented(cores % 2 == 0 || op.query.numel() / row <= cores, op.name, "deterministic",
                    "expected False, or a stream with an even number of AI cores, got True with ",
                    cores, "; torch.npu.set_stream_limit sets their number");
}

void launch_loss(const SparseLightningIndexerGradKLLoss& op,
                 const SparseLightningIndexerGradKLLoss::Outputs& outputs) {
  const bool deterministic = is_deterministic(op.deterministic);
  if (deterministic) {
    check_cores(op);
  }
  const auto& [d_query_index, d_key_index, d_weights, loss] = outputs;
  const auto ropes = ropes_or_zeros(op.query, op.key, op.query_rope, op.key_rope);
  aclnn_sparse_lightning_indexer_grad_kl_loss.in_context(deterministic_if(deterministic))(
      op.query, op.key, op.query_index, op.key_index, op.weights,
      with_head_axis(op.sparse_indices, op.query), op.softmax_max, op.softmax_sum, ropes.query,
      ropes.key, op.actual_seq_lengths_query, op.actual_seq_lengths_key, op.scale_value,
      op.layout.text(), op.sparse_mode, op.pre_tokens, op.next_tokens, deterministic, d_query_index,
      d_key_index, d_weights, loss);
}

std::vector<Sequence> sequences_of(const SparseLightningIndexerGradKLLoss& op) {
  return read_sequences(op.name, op.layout.value(), op.query, op.key, op.actual_seq_lengths_query,
                        op.actual_seq_lengths_key);
}

// The kernel ignores lengths in BSND.
void launch_padded(const SparseLightningIndexerGradKLLoss& op,
                   const SparseLightningIndexerGradKLLoss::Outputs& outputs) {
  const Packing packing(sequences_of(op), op.query, op.key);
  if (packing.complete()) {
    auto whole = op;
    whole.actual_seq_lengths_query.reset();
    whole.actual_seq_lengths_key.reset();
    launch_loss(whole, outputs);
    return;
  }
  fill_outputs(outputs, 0);
  const auto pack = [&](SparseLightningIndexerGradKLLoss& call) {
    call.sparse_indices = with_head_axis(op.sparse_indices, op.query);
    packing.pack(kQueries, call.query, call.query_index, call.weights, call.sparse_indices,
                 call.query_rope);
    packing.pack(kKeys, call.key, call.key_index, call.key_rope);
    packing.pack_statistics(call.softmax_max, call.softmax_sum);
    packing.pack_lengths(call, op.query);
  };
  packing.launch(op, outputs, pack, launch_loss, {kQueries, kKeys, kQueries, nullptr});
}

void launch_unweighted(const SparseLightningIndexerGradKLLoss& op,
                       const SparseLightningIndexerGradKLLoss::Outputs& outputs) {
  const bool has_lengths = op.actual_seq_lengths_query || op.actual_seq_lengths_key;
  if (op.layout == Layout::BSND && has_lengths) {
    launch_padded(op, outputs);
  } else {
    launch_loss(op, outputs);
  }
}

// The number of keys that each token reads, at least 1: shaped as one head of the statistics.
at::Tensor selected_keys(const SparseLightningIndexerGradKLLoss& op) {
  const auto slots = op.sparse_indices.size(-1);
  std::vector<float> counts(op.token_weight->numel(), 1);
  for (const auto& sequence : sequences_of(op)) {
    const auto visible =
        visible_keys(static_cast<SparseMode>(op.sparse_mode), sequence.queries, sequence.keys);
    for (int64_t token = 0; token < sequence.queries; ++token) {
      counts[sequence.query_begin + token] = static_cast<float>(
          std::clamp<int64_t>(visible.end(token), 1, std::max<int64_t>(slots, 1)));
    }
  }
  auto sizes = op.softmax_sum.sizes().vec();
  sizes.back() = 1;
  return to_device(at::tensor(counts), op.query).view(sizes);
}

// The kernel has no factor per token. A token that is left out gets inputs of which the loss and
// all gradients are zero: with queries of zeros its attention and its scores are uniform, and equal
// once the statistics are those of n equal scores.
void launch_masked(const SparseLightningIndexerGradKLLoss& op,
                   const SparseLightningIndexerGradKLLoss::Outputs& outputs) {
  const auto dropped = op.token_weight->eq(0);
  const auto cleared = [&](const at::Tensor& tensor) {
    auto mask = dropped;
    while (mask.dim() < tensor.dim()) {
      mask = mask.unsqueeze(-1);
    }
    return tensor.clone().masked_fill_(mask, 0);
  };
  const bool packed = op.layout == Layout::TND;
  const auto of_heads =
      packed ? dropped.unsqueeze(0).unsqueeze(-1) : dropped.unsqueeze(1).unsqueeze(-1);
  auto masked = op;
  masked.token_weight = std::nullopt;
  masked.query = cleared(op.query);
  masked.query_index = cleared(op.query_index);
  masked.weights = cleared(op.weights);
  if (op.query_rope) {
    masked.query_rope = cleared(*op.query_rope);
  }
  masked.softmax_max = op.softmax_max.clone().masked_fill_(of_heads, 0);
  masked.softmax_sum = op.softmax_sum.clone()
                           .masked_fill_(of_heads, 0)
                           .add_(of_heads.to(op.softmax_sum.scalar_type()).mul(selected_keys(op)));
  launch_unweighted(masked, outputs);
}

void sparse_lightning_indexer_grad_kl_loss(const SparseLightningIndexerGradKLLoss& op,
                                           SparseLightningIndexerGradKLLoss::Outputs& outputs) {
  check_implemented(
      !op.token_weight || op.token_weight->scalar_type() == at::kBool, op.name, "token_weight",
      "expected dtype bool on the NPU, whose kernel has no factor per token, got ",
      op.token_weight ? dtype_name(op.token_weight->scalar_type()) : "",
      "; sum the losses of groups of tokens: factor * loss(token_weight=token_weight == "
      "factor)");
  if (op.token_weight) {
    launch_masked(op, outputs);
  } else {
    launch_unweighted(op, outputs);
  }
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) {
  register_checked_kernel<SparseLightningIndexerGradKLLoss, sparse_lightning_indexer_grad_kl_loss>(
      m);
}

}  // namespace
}  // namespace ascend_attn::aclnn
