// KvQuantSparseFlashAttention: SparseFlashAttention for inference over a latent cache in int8.
#pragma once

#include <array>
#include <tuple>

#include "dispatch/arguments.h"
#include "dispatch/outputs.h"
#include "ops/key_pages.h"

namespace ascend_attn {

struct OperatorLimits;

struct KvQuantSparseFlashAttention {
  static constexpr const char* name = "kv_quant_sparse_flash_attention";
  static constexpr const char* schema =
      "(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, *, float scale_value, "
      "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
      "int sparse_block_size=1, str layout=\"BSND\", int sparse_mode=3, "
      "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, "
      "str? layout_kv=None, Tensor? block_table=None, int key_quant_mode=2, "
      "int value_quant_mode=2, int tile_size=128, int rope_head_dim=64) -> Tensor out";
  static constexpr std::array functions{"aclnnKvQuantSparseFlashAttention"};
  // vLLM-Ascend's package for customers has a function of this name with other arguments.
  static constexpr bool functions_of_cann_alone = true;
  static const OperatorLimits limits;
  static constexpr const char* no_gradient =
      "this is an operator for inference; sparse_flash_attention trains";
  using Outputs = std::tuple<at::Tensor>;
  static constexpr bool has_out_overload = true;

  at::Tensor query, key, value, sparse_indices;
  double scale_value;
  DeviceLengths actual_seq_lengths_query, actual_seq_lengths_key;
  int64_t sparse_block_size;
  LayoutArgument layout;
  int64_t sparse_mode, pre_tokens, next_tokens;
  KeyPages pages;
  int64_t key_quant_mode, value_quant_mode, tile_size, rope_head_dim;

  Outputs check_and_allocate(OutputSource outputs = {}) const;
  void check_values() const;
};

}  // namespace ascend_attn
