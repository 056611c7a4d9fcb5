#include "ops/sparse_flash_attention.h"

#include <ATen/ops/tensor.h>

#include "npu/kernel.h"
#include "npu/packing.h"
#include "ops/sparse_indices.h"

namespace ascend_attn::aclnn {
namespace {

struct SparseFlashAttentionFunction : FunctionOf<SparseFlashAttention> {
  using Prototype = int(Tensor query, Tensor key, Tensor value, Tensor sparse_indices,
                        Tensor block_table, Tensor actual_seq_lengths_query,
                        Tensor actual_seq_lengths_kv, Tensor query_rope, Tensor key_rope,
                        double scale_value, int64_t sparse_block_size, Text layout_query,
                        Text layout_kv, int64_t sparse_mode, int64_t pre_tokens,
                        int64_t next_tokens, int64_t attention_mode, bool return_softmax_lse,
                        Tensor attention_out, Tensor softmax_max, Tensor softmax_sum);
};

void sparse_flash_attention(const SparseFlashAttention& op,
                            SparseFlashAttention::Outputs& outputs) {
  check_value_is_key(op);
  constexpr int64_t kAbsorbed = 2;
  const auto& [out, softmax_max, softmax_sum] = outputs;
  FillsBeforeLaunch fills;
  if (op.options.layout == Layout::TND) {
    fills.add(out, 0);
    fills.add(softmax_max, 0);
    fills.add(softmax_sum, 0);
  }
  launch<SparseFlashAttentionFunction>.filling(fills.of_call())(
      op.query, op.key, op.value, with_head_axis(op.sparse_indices, op.query), op.pages.block_table,
      op.options.actual_seq_lengths_query, op.options.actual_seq_lengths_key, op.options.query_rope,
      op.options.key_rope, op.options.scale_value, op.options.sparse_block_size,
      op.options.layout.text(), op.pages.layout(op.options.layout), op.options.sparse_mode,
      op.options.pre_tokens, op.options.next_tokens, kAbsorbed, op.return_softmax_lse, out,
      softmax_max, softmax_sum);
}

struct SparseFlashAttentionGradFunction : FunctionOf<SparseFlashAttentionGrad> {
  using Prototype = int(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, Tensor d_out,
                        Tensor out, Tensor softmax_max, Tensor softmax_sum,
                        Tensor actual_seq_lengths_query, Tensor actual_seq_lengths_kv,
                        Tensor query_rope, Tensor key_rope, double scale_value,
                        int64_t sparse_block_size, Text layout, int64_t sparse_mode,
                        int64_t pre_tokens, int64_t next_tokens, bool deterministic, Tensor d_query,
                        Tensor d_key, Tensor d_value, Tensor d_query_rope, Tensor d_key_rope);
};

void launch_grad(const SparseFlashAttentionGrad& op,
                 const SparseFlashAttentionGrad::Outputs& outputs) {
  const auto& [d_query, d_key, d_value, d_query_rope, d_key_rope] = outputs;
  launch<SparseFlashAttentionGradFunction>(
      op.query, op.key, op.value, with_head_axis(op.sparse_indices, op.query), op.d_out, op.out,
      op.softmax_max, op.softmax_sum, op.options.actual_seq_lengths_query,
      op.options.actual_seq_lengths_key, op.options.query_rope, op.options.key_rope,
      op.options.scale_value, op.options.sparse_block_size, op.options.layout.text(),
      op.options.sparse_mode, op.options.pre_tokens, op.options.next_tokens,
      DeterministicContext{is_deterministic(op.options.deterministic)}, d_query, d_key, d_value,
      d_query_rope, d_key_rope);
}

// The kernel ignores lengths in BSND.
void launch_padded_grad(const SparseFlashAttentionGrad& op,
                        const SparseFlashAttentionGrad::Outputs& outputs) {
  const auto& options = op.options;
  const Packing packing(
      sequences_on_host(op.name, Layout::BSND, op.query, op.key, options.actual_seq_lengths_query,
                        options.actual_seq_lengths_key),
      op.query, op.key);
  const std::optional<at::Tensor> none;
  if (packing.complete()) {
    launch_grad({op.query,
                 op.key,
                 op.value,
                 op.sparse_indices,
                 op.d_out,
                 op.out,
                 op.softmax_max,
                 op.softmax_sum,
                 {options.scale_value, none, none, options.query_rope, options.key_rope,
                  options.sparse_block_size, options.layout, options.sparse_mode,
                  options.pre_tokens, options.next_tokens, options.deterministic}},
                outputs);
    return;
  }
  const auto& [d_query, d_key, d_value, d_query_rope, d_key_rope] = outputs;
  for (const auto& output : {d_query, d_key, d_value, d_query_rope, d_key_rope}) {
    fill_before_launch(output, 0);
  }
  if (packing.empty()) {
    return;
  }
  const auto queries = [&](const at::Tensor& tensor) { return packing.queries(tensor); };
  const auto statistics = [&](const at::Tensor& tensor) {
    return packing.queries(tensor.squeeze(1)).unsqueeze(0);
  };
  const auto query = queries(op.query);
  const auto key = packing.keys(op.key);
  const auto value = value_is_key(op) ? key : packing.keys(op.value);
  const auto sparse_indices = queries(with_head_axis(op.sparse_indices, op.query));
  const auto d_out = queries(op.d_out);
  const auto out = queries(op.out);
  const auto softmax_max = statistics(op.softmax_max);
  const auto softmax_sum = statistics(op.softmax_sum);
  const auto query_rope =
      options.query_rope ? std::optional(queries(*options.query_rope)) : std::nullopt;
  const auto key_rope =
      options.key_rope ? std::optional(packing.keys(*options.key_rope)) : std::nullopt;
  const std::optional query_ends(to_device(at::tensor(packing.query_ends()), op.query));
  const std::optional key_ends(to_device(at::tensor(packing.key_ends()), op.query));
  const SparseFlashAttentionGrad packed{
      query,
      key,
      value,
      sparse_indices,
      d_out,
      out,
      softmax_max,
      softmax_sum,
      {options.scale_value, query_ends, key_ends, query_rope, key_rope, options.sparse_block_size,
       LayoutArgument("TND"), options.sparse_mode, options.pre_tokens, options.next_tokens,
       options.deterministic}};
  const auto gradients = packed.check_and_allocate();
  launch_grad(packed, gradients);
  packing.unpack_queries(std::get<0>(gradients), d_query);
  packing.unpack_keys(std::get<1>(gradients), d_key);
  packing.unpack_keys(std::get<2>(gradients), d_value);
  if (query_rope) {
    packing.unpack_queries(std::get<3>(gradients), d_query_rope);
    packing.unpack_keys(std::get<4>(gradients), d_key_rope);
  }
}

void sparse_flash_attention_grad(const SparseFlashAttentionGrad& op,
                                 SparseFlashAttentionGrad::Outputs& outputs) {
  check_value_is_key(op);
  const bool has_lengths = op.options.actual_seq_lengths_query || op.options.actual_seq_lengths_key;
  if (op.options.layout == Layout::BSND && has_lengths) {
    launch_padded_grad(op, outputs);
  } else {
    launch_grad(op, outputs);
  }
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) {
  register_kernel<SparseFlashAttention, sparse_flash_attention>(m);
  register_kernel<SparseFlashAttentionGrad, sparse_flash_attention_grad>(m);
}

}  // namespace
}  // namespace ascend_attn::aclnn
