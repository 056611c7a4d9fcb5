#include "ops/sparse_lightning_indexer_kl_loss_grad.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>

#include <optional>

#include "npu/compressed_keys.h"
#include "npu/kernel.h"
#include "npu/packing.h"
#include "ops/sparse_indices.h"

namespace ascend_attn::aclnn {
namespace {

using KLLossGradPrototype = int(AclTensor query_index, AclTensor key_index, AclTensor weights,
                                AclTensor sparse_indices, AclTensor attn_softmax_l1_norm,
                                AclTensor cu_seqlens_query, AclTensor cu_seqlens_key,
                                AclTensor seqused_query, AclTensor seqused_key,
                                AclTensor cmp_residual_key, AclTensor metadata, char* layout_query,
                                char* layout_key, int64_t mask_mode, int64_t cmp_ratio,
                                AclTensor d_query_index, AclTensor d_key_index, AclTensor d_weights,
                                AclTensor softmax_out);
constexpr Launcher<SparseLightningIndexerKLLossGrad, KLLossGradPrototype>
    aclnn_sparse_lightning_indexer_kl_loss_grad;

void launch(const SparseLightningIndexerKLLossGrad& op,
            const SparseLightningIndexerKLLossGrad::Outputs& outputs) {
  const auto& [d_query_index, d_key_index, d_weights, softmax_out] = outputs;
  const bool packed = op.layout == Layout::TND;
  Fills fills;
  if (packed) {
    // Keys may follow the last sequence.
    add_fill(fills, d_key_index, 0);
  }
  using Lengths = std::optional<at::Tensor>;
  Lengths cu_query, cu_key;
  auto residual = residual_of(op.selection(), packed);
  if (packed) {
    // The kernel finds the sequence of every row of the shape, and reads behind the lengths where
    // there is none. A last sequence, without keys, has the rows that belong to no other.
    cu_query = at::constant_pad_nd(cu_seqlens(*op.actual_seq_lengths_query), {0, 1},
                                   op.query_index.size(0));
    const auto ends = cu_seqlens(*op.actual_seq_lengths_key);
    cu_key = at::cat({ends, ends.narrow(0, ends.size(0) - 1, 1)});
    if (residual) {
      residual = at::constant_pad_nd(*residual, {0, 1});
    }
  }
  // A2 and A3 need no metadata: without it, their kernel divides the rows evenly.
  aclnn_sparse_lightning_indexer_kl_loss_grad.with(fills)(
      op.query_index, op.key_index, op.weights, with_head_axis(op.sparse_indices, op.query_index),
      with_head_axis(op.attn_softmax_l1_norm, op.query_index), cu_query, cu_key, std::nullopt,
      std::nullopt, residual, std::nullopt, op.layout.text(), op.layout.text(), op.sparse_mode,
      op.cmp_ratio, d_query_index, d_key_index, d_weights,
      with_head_axis(softmax_out, op.query_index));
}

// The kernel reads no lengths of a padded batch.
void launch_padded(const SparseLightningIndexerKLLossGrad& op,
                   const SparseLightningIndexerKLLossGrad::Outputs& outputs) {
  const Packing packing(sequences_on_host(op.name, op.layout.value(), op.query_index, op.key_index,
                                          op.actual_seq_lengths_query, op.actual_seq_lengths_key),
                        op.query_index, op.key_index);
  fill_outputs(outputs, 0);
  const auto pack = [&](SparseLightningIndexerKLLossGrad& call) {
    call.sparse_indices = with_head_axis(op.sparse_indices, op.query_index);
    call.attn_softmax_l1_norm = with_head_axis(op.attn_softmax_l1_norm, op.query_index);
    packing.pack(kQueries, call.query_index, call.weights, call.sparse_indices,
                 call.attn_softmax_l1_norm);
    packing.pack(kKeys, call.key_index);
    packing.pack_numbers(call.cmp_residual_key);
    packing.pack_lengths(call, op.query_index);
  };
  packing.launch(op, outputs, pack, launch, {kQueries, kKeys, kQueries, kQueries});
}

void sparse_lightning_indexer_kl_loss_grad(const SparseLightningIndexerKLLossGrad& op,
                                           SparseLightningIndexerKLLossGrad::Outputs& outputs) {
  const bool launched =
      op.query_index.size(0) != 0 && op.query_index.size(-3) != 0 && op.key_index.size(-3) != 0;
  const bool has_lengths = op.actual_seq_lengths_query || op.actual_seq_lengths_key;
  if (!launched) {
    fill_outputs(outputs, 0);
  } else if (has_lengths && op.layout == Layout::BSND) {
    launch_padded(op, outputs);
  } else {
    launch(op, outputs);
  }
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) {
  register_checked_kernel<SparseLightningIndexerKLLossGrad, sparse_lightning_indexer_kl_loss_grad>(
      m);
}

}  // namespace
}  // namespace ascend_attn::aclnn
