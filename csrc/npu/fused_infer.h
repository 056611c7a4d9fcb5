// FusedInferAttentionScore of CANN: V4 is for Atlas A2 and A3, V5 for Ascend 950. Both take the
// same arguments but three, which have no effect without a position bias.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <optional>
#include <string_view>

#include "core/lengths.h"
#include "npu/aclnn/launcher.h"
#include "npu/compressed_masks.h"

namespace ascend_attn::aclnn {

// A value of inner_precise, of PromptFlashAttention too: a softmax in float32, and zeros in rows
// that the content of a mask masks whole, as on the CPU.
inline constexpr int64_t kCorrectsMaskedRows = 2;

// A call without the arguments that this library never gives.
struct FusedInfer {
  const at::Tensor& query;
  const at::Tensor& key;
  const at::Tensor& value;
  std::optional<at::Tensor> atten_mask = {};
  std::optional<IntegerList> query_lengths = {}, key_lengths = {};
  std::optional<at::Tensor> quant_scale2 = {}, quant_offset2 = {};
  std::optional<at::Tensor> key_antiquant_scale = {}, value_antiquant_scale = {};
  int64_t key_antiquant_mode = 0, value_antiquant_mode = 0;
  std::optional<at::Tensor> dequant_scale_query = {};
  int64_t query_quant_mode = 0;
  std::optional<at::Tensor> block_table = {}, query_rope = {}, key_rope = {}, sink = {};
  int64_t num_heads;
  double scale_value;
  int64_t pre_tokens = INT32_MAX, next_tokens = INT32_MAX;
  std::string_view layout;
  int64_t num_key_value_heads;
  int64_t sparse_mode = 0;
  int64_t inner_precise;
  int64_t block_size = 0;
  bool return_softmax_lse = false;
  const at::Tensor& out;
  std::optional<at::Tensor> softmax_lse = {};
};

// Returns a tensor without gaps, which the functions require. A call that a graph launches again
// has no other: a copy would be gone when the graph is replayed.
at::Tensor dense(const char* op, const at::Tensor& tensor);
std::optional<at::Tensor> dense(const char* op, const std::optional<at::Tensor>& tensor);

// Returns one length per batch, which V5 asks of the keys.
IntegerList lengths_per_batch(const Lengths& lengths, int64_t batches, int64_t tokens);

// Returns the mask of a call, which its sparse_mode may have without one.
template <typename Op>
std::optional<at::Tensor> mask_of(const Op& op) {
  return op.masked() && !op.atten_mask
             ? std::optional(compressed_mask(op.name, static_cast<SparseMode>(op.sparse_mode),
                                             op.query.options()))
             : op.atten_mask;
}
// Returns a mask as V5 takes it: full ones with an axis of batches, and none without elements.
// `rows_are_batches`: what the first of two axes are.
std::optional<at::Tensor> launched_mask(const char* op, const std::optional<at::Tensor>& mask,
                                        int64_t sparse_mode, bool rows_are_batches);

// Says with the lengths of the keys, and a mask of one row, what a call with one query per batch
// keeps: CANN documents that such a call ignores the mode, the tokens and the lengths of queries. A
// band that begins behind key 0 needs a new mask, of `most_keys` columns.
void keep_by_lengths(const char* op, FusedInfer& call, int64_t most_keys);

template <typename... Starts>
struct FusedInferPrototype {
  template <typename... PseType>
  using With = int(AclTensor query, AclTensorList key, AclTensorList value, AclTensor pse_shift,
                   AclTensor atten_mask, AclIntArray actual_seq_lengths,
                   AclIntArray actual_seq_lengths_kv, AclTensor deq_scale1, AclTensor quant_scale1,
                   AclTensor deq_scale2, AclTensor quant_scale2, AclTensor quant_offset2,
                   AclTensor antiquant_scale, AclTensor antiquant_offset, AclTensor block_table,
                   AclTensor query_padding_size, AclTensor kv_padding_size,
                   AclTensor key_antiquant_scale, AclTensor key_antiquant_offset,
                   AclTensor value_antiquant_scale, AclTensor value_antiquant_offset,
                   AclTensor key_shared_prefix, AclTensor value_shared_prefix,
                   AclIntArray actual_shared_prefix_len, AclTensor query_rope, AclTensor key_rope,
                   AclTensor key_rope_antiquant_scale, AclTensor dequant_scale_query,
                   AclTensor learnable_sink, Starts... starts, int64_t num_heads,
                   double scale_value, int64_t pre_tokens, int64_t next_tokens, char* input_layout,
                   int64_t num_key_value_heads, int64_t sparse_mode, int64_t inner_precise,
                   int64_t block_size, int64_t antiquant_mode, bool softmax_lse_flag,
                   int64_t key_antiquant_mode, int64_t value_antiquant_mode,
                   int64_t query_quant_mode, PseType... pse_type, AclTensor attention_out,
                   AclTensor softmax_lse);
};
using FusedInferV4 = FusedInferPrototype<>::With<>;
using FusedInferV5 = FusedInferPrototype<AclIntArray, AclIntArray>::With<int64_t>;

// Calls one of the functions that `Op` declares, which has that prototype.
template <typename Op, typename Prototype, size_t index>
void launch_fused_infer(const FusedInfer& call) {
  static constexpr Launcher<Op, Prototype, index> function;
  constexpr auto none = std::nullopt;
  constexpr int64_t zero = 0;
  const std::optional<IntegerList> no_list;
  const auto with = [&](auto... starts) {
    return [&, starts...](auto... pse_type) {
      function(call.query, at::TensorList(call.key), at::TensorList(call.value), none,
               call.atten_mask, call.query_lengths, call.key_lengths, none, none, none,
               call.quant_scale2, call.quant_offset2, none, none, call.block_table, none, none,
               call.key_antiquant_scale, none, call.value_antiquant_scale, none, none, none,
               no_list, call.query_rope, call.key_rope, none, call.dequant_scale_query, call.sink,
               starts..., call.num_heads, call.scale_value, call.pre_tokens, call.next_tokens,
               call.layout, call.num_key_value_heads, call.sparse_mode, call.inner_precise,
               call.block_size, zero, call.return_softmax_lse, call.key_antiquant_mode,
               call.value_antiquant_mode, call.query_quant_mode, pse_type..., call.out,
               call.softmax_lse);
    };
  };
  if constexpr (std::same_as<Prototype, FusedInferV5>) {
    with(no_list, no_list)(zero);
  } else {
    with()();
  }
}

}  // namespace ascend_attn::aclnn
