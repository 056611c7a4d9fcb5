// SparseFlashMla and SparseFlashMlaGrad, the attention of DeepSeek-V4: one softmax over a window of
// the original keys, over compressed keys and over a sink. A key is its own value.
#pragma once

#include <array>
#include <tuple>
#include <vector>

#include "dispatch/arguments.h"
#include "ops/key_pages.h"

namespace ascend_attn {

struct OperatorLimits;

// Keyword arguments shared by both operators.
struct SparseMlaOptions {
  static constexpr bool is_argument_group = true;

  double scale_value;
  std::optional<at::Tensor> sink;
  DeviceLengths actual_seq_lengths_query, actual_seq_lengths_ori_kv, actual_seq_lengths_cmp_kv;
  std::optional<at::Tensor> cmp_residual_kv;
  int64_t cmp_ratio, ori_mask_mode, cmp_mask_mode, ori_win_left, ori_win_right;
  LayoutArgument layout;
  bool deterministic;
};

struct SparseMlaPages {
  static constexpr bool is_argument_group = true;

  KeyLayoutArgument layout_kv;
  std::optional<at::Tensor> ori_block_table, cmp_block_table;

  KeyPages ori() const { return {layout_kv, ori_block_table}; }
  KeyPages cmp() const { return {layout_kv, cmp_block_table}; }
};

struct SparseFlashMla {
  static constexpr const char* name = "sparse_flash_mla";
  static constexpr const char* schema =
      "(Tensor query, Tensor ori_kv, Tensor? cmp_kv=None, Tensor? cmp_sparse_indices=None, *, "
      "float scale_value, Tensor? sink=None, Tensor? actual_seq_lengths_query=None, "
      "Tensor? actual_seq_lengths_ori_kv=None, Tensor? actual_seq_lengths_cmp_kv=None, "
      "Tensor? cmp_residual_kv=None, int cmp_ratio=1, int ori_mask_mode=4, int cmp_mask_mode=3, "
      "int ori_win_left=127, int ori_win_right=0, str layout=\"BSND\", bool deterministic=False, "
      "str? layout_kv=None, Tensor? ori_block_table=None, Tensor? cmp_block_table=None, "
      "bool return_softmax_lse=True) -> (Tensor out, Tensor softmax_lse)";
  static constexpr std::array functions{"aclnnSparseFlashMla", "aclnnSparseFlashMlaMetadata"};
  static const OperatorLimits limits;
  using Outputs = std::tuple<at::Tensor, at::Tensor>;  // out, softmax_lse

  at::Tensor query, ori_kv;
  std::optional<at::Tensor> cmp_kv, cmp_sparse_indices;
  SparseMlaOptions options;
  SparseMlaPages pages;
  bool return_softmax_lse;

  Outputs check_and_allocate() const;
  void check_values() const;

  bool differentiable() const;
  // The call that autograd records: its backward reads softmax_lse.
  SparseFlashMla recorded() const;
  // Returns the outputs of this call, of those of recorded().
  Outputs returned(const Outputs& outputs) const;
  std::vector<size_t> constant_outputs() const;
  void save(AutogradContext& context, const Outputs& outputs) const;
  static std::vector<at::Tensor> backward(AutogradContext& context,
                                          const std::vector<at::Tensor>& d_outputs);
};

struct SparseFlashMlaGrad {
  static constexpr const char* name = "sparse_flash_mla_grad";
  static constexpr const char* schema =
      "(Tensor query, Tensor ori_kv, Tensor? cmp_kv, Tensor? cmp_sparse_indices, Tensor? d_out, "
      "Tensor out, Tensor softmax_lse, *, float scale_value, Tensor? sink=None, "
      "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_ori_kv=None, "
      "Tensor? actual_seq_lengths_cmp_kv=None, Tensor? cmp_residual_kv=None, int cmp_ratio=1, "
      "int ori_mask_mode=4, int cmp_mask_mode=3, int ori_win_left=127, int ori_win_right=0, "
      "str layout=\"BSND\", bool deterministic=False, Tensor? d_softmax_lse=None) -> "
      "(Tensor d_query, Tensor d_ori_kv, Tensor d_cmp_kv, Tensor d_sink, "
      "Tensor cmp_softmax_l1_norm)";
  static constexpr std::array functions{"aclnnSparseFlashMlaGrad"};
  static const OperatorLimits limits;
  using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                             at::Tensor>;  // d_query, d_ori_kv, d_cmp_kv, d_sink, l1 norm

  at::Tensor query, ori_kv;
  std::optional<at::Tensor> cmp_kv, cmp_sparse_indices, d_out;
  at::Tensor out, softmax_lse;
  SparseMlaOptions options;
  std::optional<at::Tensor> d_softmax_lse;

  Outputs check_and_allocate() const;
  void check_values() const;
};

}  // namespace ascend_attn
