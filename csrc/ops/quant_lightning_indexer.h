// QuantLightningIndexer: the selection of LightningIndexer from int8 queries and keys, for serving.
#pragma once

#include <array>
#include <tuple>

#include "dispatch/arguments.h"
#include "dispatch/outputs.h"
#include "ops/key_pages.h"

namespace ascend_attn {

struct OperatorLimits;

struct QuantLightningIndexer {
  static constexpr const char* name = "quant_lightning_indexer";
  static constexpr const char* schema =
      "(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale, "
      "Tensor key_dequant_scale, *, Tensor? actual_seq_lengths_query=None, "
      "Tensor? actual_seq_lengths_key=None, str layout=\"BSND\", SymInt sparse_count=2048, "
      "int sparse_mode=3, int pre_tokens=9223372036854775807, "
      "int next_tokens=9223372036854775807, str? layout_key=None, Tensor? block_table=None, "
      "int query_quant_mode=0, int key_quant_mode=0) -> Tensor sparse_indices";
  static constexpr std::array functions{"aclnnQuantLightningIndexer"};
  static const OperatorLimits limits;
  static constexpr bool has_out_overload = true;
  static constexpr const char* no_gradient =
      "this is an operator for inference; lightning_indexer trains";
  using Outputs = std::tuple<at::Tensor>;

  at::Tensor query, key, weights, query_dequant_scale, key_dequant_scale;
  DeviceLengths actual_seq_lengths_query, actual_seq_lengths_key;
  LayoutArgument layout;
  c10::SymInt sparse_count;
  int64_t sparse_mode, pre_tokens, next_tokens;
  KeyPages pages;
  int64_t query_quant_mode, key_quant_mode;

  Outputs check_and_allocate(OutputSource outputs = {}) const;
  void check_values() const;
};

}  // namespace ascend_attn
