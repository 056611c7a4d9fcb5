#include "ops/sparse_flash_mla.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include "npu/call_of_statistics.h"
#include "npu/compressed_keys.h"
#include "npu/kernel.h"
#include "ops/sparse_indices.h"

namespace ascend_attn::aclnn {
namespace {

using SparseFlashMlaPrototype =
    int(AclTensor query, AclTensor ori_kv, AclTensor cmp_kv, AclTensor ori_sparse_indices,
        AclTensor cmp_sparse_indices, AclTensor ori_block_table, AclTensor cmp_block_table,
        AclTensor cu_seqlens_query, AclTensor cu_seqlens_ori_kv, AclTensor cu_seqlens_cmp_kv,
        AclTensor seqused_query, AclTensor seqused_ori_kv, AclTensor seqused_cmp_kv,
        AclTensor cmp_residual_kv, AclTensor ori_topk_length, AclTensor cmp_topk_length,
        AclTensor sinks, AclTensor metadata, double softmax_scale, int64_t cmp_ratio,
        int64_t ori_mask_mode, int64_t cmp_mask_mode, int64_t ori_win_left, int64_t ori_win_right,
        char* layout_query, char* layout_kv, int64_t topk_value_mode, bool return_softmax_lse,
        AclTensor out, AclTensor softmax_lse);
constexpr Launcher<SparseFlashMla, SparseFlashMlaPrototype> aclnn_sparse_flash_mla;

using MetadataPrototype = int(AclTensor cu_seqlens_query, AclTensor cu_seqlens_ori_kv,
                              AclTensor cu_seqlens_cmp_kv, AclTensor seqused_query,
                              AclTensor seqused_ori_kv, AclTensor seqused_cmp_kv,
                              AclTensor cmp_residual_kv, AclTensor ori_topk_length,
                              AclTensor cmp_topk_length, int64_t heads_query, int64_t heads_kv,
                              int64_t head_size, int64_t batch, int64_t longest_query,
                              int64_t longest_ori_kv, int64_t longest_cmp_kv, int64_t ori_topk,
                              int64_t cmp_topk, int64_t cmp_ratio, int64_t ori_mask_mode,
                              int64_t cmp_mask_mode, int64_t ori_win_left, int64_t ori_win_right,
                              char* layout_query, char* layout_kv, bool has_ori_kv, bool has_cmp_kv,
                              AclTensor metadata);
constexpr Launcher<SparseFlashMla, MetadataPrototype, 1> aclnn_sparse_flash_mla_metadata;

using SparseFlashMlaGradPrototype = int(
    AclTensor query, AclTensor d_out, AclTensor out, AclTensor softmax_lse, AclTensor ori_kv,
    AclTensor cmp_kv, AclTensor ori_sparse_indices, AclTensor cmp_sparse_indices,
    AclTensor cu_seqlens_query, AclTensor cu_seqlens_ori_kv, AclTensor cu_seqlens_cmp_kv,
    AclTensor seqused_query, AclTensor seqused_ori_kv, AclTensor seqused_cmp_kv,
    AclTensor cmp_residual_kv, AclTensor ori_topk_length, AclTensor cmp_topk_length,
    AclTensor sinks, AclTensor metadata, double scale_value, int64_t cmp_ratio,
    int64_t ori_mask_mode, int64_t cmp_mask_mode, int64_t ori_win_left, int64_t ori_win_right,
    char* layout_query, char* layout_kv, AclTensor d_query, AclTensor d_ori_kv, AclTensor d_cmp_kv,
    AclTensor d_sinks, AclTensor ori_softmax_l1_norm, AclTensor cmp_softmax_l1_norm);
constexpr Launcher<SparseFlashMlaGrad, SparseFlashMlaGradPrototype> aclnn_sparse_flash_mla_grad;

using OptionalTensor = std::optional<at::Tensor>;

// CANN compares the strides of keys with dense ones also where the size is 1.
at::Tensor with_dense_strides(const at::Tensor& keys) {
  const auto dense = keys.contiguous();
  c10::SmallVector<int64_t, 4> strides(dense.dim());
  int64_t stride = 1;
  for (int64_t axis = dense.dim() - 1; axis >= 0; --axis) {
    strides[axis] = stride;
    stride *= dense.size(axis);
  }
  return dense.strides() == at::IntArrayRef(strides) ? dense
                                                     : dense.as_strided(dense.sizes(), strides);
}

// The arguments that the metadata and the operator must have in common: a core that reads metadata
// of other lengths skips rows, and CANN compares nothing.
struct MlaCall {
  template <typename Op>
  MlaCall(const Op& op, const SparseMlaPages& pages)
      : options(op.options),
        paged(pages.layout_kv.paged()),
        query(op.query),
        ori_kv(with_dense_strides(op.ori_kv)),
        heads(query.size(-2)),
        head_size(query.size(-1)),
        layout_kv(paged ? "PA_BBND" : options.layout.text()) {
    // Without a compressed key a call is that of a window: CANN takes no empty tensor.
    if (op.cmp_kv && op.cmp_kv->size(0) > 0 && op.cmp_kv->size(-3) > 0) {
      cmp_kv = with_dense_strides(*op.cmp_kv);
      ratio = options.cmp_ratio;
      if (op.cmp_sparse_indices) {
        indices = with_head_axis(*op.cmp_sparse_indices, query).contiguous();
      }
    }
    set_lengths();
    if (cmp_kv) {
      residual = options.cmp_residual_kv ? *options.cmp_residual_kv : residual_of_keys();
    }
    if (paged) {
      ori_table = pages.ori_block_table;
      longest_ori = ori_table->size(1) * ori_kv.size(1);
      if (cmp_kv) {
        cmp_table = pages.cmp_block_table;
        longest_cmp = cmp_table->size(1) * cmp_kv->size(1);
      }
    }
  }

  const SparseMlaOptions& options;
  bool paged;
  at::Tensor query, ori_kv;
  OptionalTensor cmp_kv, indices, ori_table, cmp_table, residual;
  OptionalTensor cu_query, cu_ori, cu_cmp, seq_query, seq_ori, seq_cmp;
  int64_t heads, head_size;
  int64_t ratio = 1;
  // 0: the device derives them from the cumulative lengths.
  int64_t batch = 0;
  int64_t longest_query = 0;
  int64_t longest_ori = 0;
  int64_t longest_cmp = 0;
  std::string_view layout_kv;

 private:
  void set_lengths() {
    const bool packed = options.layout == Layout::TND;
    if (packed) {
      cu_query = cu_seqlens(*options.actual_seq_lengths_query);
    } else {
      seq_query = options.actual_seq_lengths_query;
      batch = query.size(0);
      longest_query = query.size(1);
      longest_ori = ori_kv.size(1);
      longest_cmp = cmp_kv ? cmp_kv->size(1) : 0;
    }
    if (packed && !paged) {
      cu_ori = cu_seqlens(*options.actual_seq_lengths_ori_kv);
      if (cmp_kv) {
        cu_cmp = cu_seqlens(*options.actual_seq_lengths_cmp_kv);
      }
    } else {
      seq_ori = options.actual_seq_lengths_ori_kv;
      seq_cmp = cmp_kv ? options.actual_seq_lengths_cmp_kv : std::nullopt;
    }
  }

  // The original keys are all tokens of a sequence.
  at::Tensor residual_of_keys() const {
    const bool packed = options.layout == Layout::TND;
    const bool cumulative = packed && !paged;
    return derived_residual(
        {options.actual_seq_lengths_ori_kv, cumulative, ori_kv.size(-3)},
        {options.actual_seq_lengths_cmp_kv, cumulative, cmp_kv->size(-3)}, options.cmp_ratio,
        packed ? options.actual_seq_lengths_query->size(0) : query.size(0), query);
  }
};

at::Tensor metadata_of(const MlaCall& call) {
  constexpr int64_t kMetadataSize = 1024;
  constexpr int64_t kKeyHeads = 1;
  const auto metadata = at::empty({kMetadataSize}, call.query.options().dtype(at::kInt));
  const auto& o = call.options;
  aclnn_sparse_flash_mla_metadata(
      call.cu_query, call.cu_ori, call.cu_cmp, call.seq_query, call.seq_ori, call.seq_cmp,
      call.residual, std::nullopt, std::nullopt, call.heads, kKeyHeads, call.head_size, call.batch,
      call.longest_query, call.longest_ori, call.longest_cmp, int64_t{0},
      call.indices ? call.indices->size(-1) : int64_t{0}, call.ratio, o.ori_mask_mode,
      o.cmp_mask_mode, o.ori_win_left, o.ori_win_right, o.layout.text(), call.layout_kv, true,
      call.cmp_kv.has_value(), metadata);
  return metadata;
}

void sparse_flash_mla(const SparseFlashMla& op, SparseFlashMla::Outputs& outputs) {
  constexpr int64_t kIndices = 1;
  const MlaCall call(op, op.pages);
  const auto& [out, softmax_lse] = outputs;
  Fills fills;
  if (op.options.layout == Layout::TND) {
    add_fill(fills, out, 0);
    add_fill(fills, softmax_lse, 0);
  }
  const auto metadata = metadata_of(call);
  const auto& o = op.options;
  aclnn_sparse_flash_mla.with(fills)(
      call.query, call.ori_kv, call.cmp_kv, std::nullopt, call.indices, call.ori_table,
      call.cmp_table, call.cu_query, call.cu_ori, call.cu_cmp, call.seq_query, call.seq_ori,
      call.seq_cmp, call.residual, std::nullopt, std::nullopt, o.sink, metadata, o.scale_value,
      call.ratio, o.ori_mask_mode, o.cmp_mask_mode, o.ori_win_left, o.ori_win_right,
      o.layout.text(), call.layout_kv, kIndices, op.return_softmax_lse, out, softmax_lse);
}

// CANN refuses the gradient in a deterministic context, also where torch only asks for a warning.
ContextDeterminism determinism_of_gradient(const SparseMlaOptions& options) {
  if (at::globalContext().deterministicAlgorithmsWarnOnly()) {
    return false;
  }
  return deterministic_if(options.deterministic);
}

void launch_grad(const SparseFlashMlaGrad& op, SparseFlashMlaGrad::Outputs& outputs) {
  const MlaCall call(op, SparseMlaPages{});
  const auto& [d_query, d_ori_kv, d_cmp_kv, d_sink, cmp_softmax_l1_norm] = outputs;
  const auto& o = op.options;
  Fills fills;
  if (o.layout == Layout::TND) {
    add_fill(fills, d_ori_kv, 0);
    add_fill(fills, d_cmp_kv, 0);
  }
  // Slots behind those that a row reads.
  fill_output(cmp_softmax_l1_norm, 0);
  const auto none = at::empty({0}, op.softmax_lse.options());
  aclnn_sparse_flash_mla_grad.with(fills).in_context(determinism_of_gradient(o))(
      call.query, op.d_out, op.out, op.softmax_lse, call.ori_kv, call.cmp_kv, std::nullopt,
      call.indices, call.cu_query, call.cu_ori, call.cu_cmp, call.seq_query, call.seq_ori,
      call.seq_cmp, call.residual, std::nullopt, std::nullopt, o.sink, std::nullopt, o.scale_value,
      call.ratio, o.ori_mask_mode, o.cmp_mask_mode, o.ori_win_left, o.ori_win_right,
      o.layout.text(), o.layout.text(), d_query, d_ori_kv, d_cmp_kv, d_sink, none,
      call.indices ? cmp_softmax_l1_norm : none);
}

// The device sums P * dP for the sink, which is 0 in the call of the statistics.
void add_sink_of_lse(const SparseFlashMlaGrad& op, const at::Tensor& d_sink) {
  const auto lse = op.softmax_lse.squeeze(-3);
  const auto d_lse = op.d_softmax_lse->squeeze(-3);
  // The lse of a row without keys is a constant, 0.
  const auto no_keys = lse.eq(0).logical_and(op.out.eq(0).all(-1));
  const auto d_score = (*op.options.sink - lse).exp().mul(d_lse).masked_fill(no_keys, 0);
  d_sink.add_(d_score.flatten(0, -2).sum(0));
}

void sparse_flash_mla_grad(const SparseFlashMlaGrad& op, SparseFlashMlaGrad::Outputs& outputs) {
  if (!op.d_softmax_lse) {
    launch_grad(op, outputs);
    return;
  }
  add_gradients_of_statistics<0, 1, 2>(op.d_out.has_value(), op,
                                       call_of_statistics(op, "d_softmax_lse", *op.d_softmax_lse),
                                       outputs, launch_grad);
  if (op.options.sink) {
    add_sink_of_lse(op, std::get<3>(outputs));
  }
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) {
  register_checked_kernel<SparseFlashMla, sparse_flash_mla>(m);
  register_checked_kernel<SparseFlashMlaGrad, sparse_flash_mla_grad>(m);
}

}  // namespace
}  // namespace ascend_attn::aclnn
