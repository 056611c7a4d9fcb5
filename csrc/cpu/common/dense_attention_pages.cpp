// Calls of dense attention whose keys may lie in the pages of a cache.
#include "core/error.h"
#include "core/pack_hints.h"
#include "core/symbolic.h"
#include "core/tensor_checks.h"
#include "core/value_checks.h"
#include "cpu/common/dense_attention.h"
#include "cpu/common/sparse_indices.h"

namespace ascend_attn::cpu {
namespace {

// Views pages as (num_blocks, N, block_size, D), and fractal ones as (num_blocks, N, block_size,
// D / 16, 16).
at::Tensor pages_by_head(PageForm form, const at::Tensor& pages, int64_t heads) {
  const auto dense = with_dense_rows(pages);
  switch (form) {
    case PageForm::rows:
      return dense.unflatten(-1, {heads, -1}).transpose(1, 2);
    case PageForm::heads:
      return dense;
    case PageForm::fractals:
      return dense.permute({0, 1, 3, 2, 4});
  }
  return {};
}

// Checks the numbers of the blocks from which keys [begin, end) are read.
void check_blocks(const DenseSequence& sequence, int64_t begin, int64_t end, int64_t block_size,
                  int64_t num_blocks) {
  for (int64_t at = begin / block_size; at * block_size < end; ++at) {
    const int64_t block = sequence.blocks[at];
    check_value(block >= 0 && block < num_blocks, FusedInferAttentionScore::name, "block_table",
                "expected block numbers in 0..", num_blocks - 1, ", got ", block, " at [",
                sequence.index, ", ", at, "], for the ", sequence.keys, " keys of the sequence");
  }
}

}  // namespace

DenseAttention::DenseAttention(const FusedInferAttentionScore& op)
    : layout(op.infer_layout().inputs),
      heads(op.heads().expect_int()),
      key_heads(op.key_heads().expect_int()),
      scale(op.scale()) {
  const auto keys_by_head = [&](const at::Tensor& tensor) {
    return op.block_table ? pages_by_head(op.page_form(), tensor, key_heads)
                          : by_head(with_dense_rows(tensor), key_heads);
  };
  const auto size_of_heads = [](const at::Tensor& tensor) {
    return tensor.dim() == 5 ? tensor.size(3) * tensor.size(4) : tensor.size(3);
  };
  query = by_head(with_dense_rows(op.query), heads);
  key = keys_by_head(op.key);
  value = keys_by_head(op.value);
  size = query.size(3);
  value_size = size_of_heads(value);
  if (op.sink) {
    sink = op.sink->to(statistics_dtype(op.query)).contiguous();
  }
  const auto mode = static_cast<SparseMode>(op.sparse_mode);
  for (const auto& tokens : op.sequences()) {
    add_sequence(tokens, op.masked(), mode, op.pre_tokens, op.next_tokens);
  }
  if (op.atten_mask) {
    // A mask of two axes has one row for each batch where each has a single query.
    const bool of_batches =
        !has_compressed_mask(mode) && op.atten_mask->dim() == 2 && query.size(2) == 1;
    read_mask_of_inference(op.name, of_batches ? op.atten_mask->unsqueeze(1) : *op.atten_mask,
                           mode);
  }
  if (op.block_table) {
    read_block_table(*op.block_table);
  }
  if (op.query_rope) {
    add_ropes(by_head(with_dense_rows(*op.query_rope), heads), keys_by_head(*op.key_rope));
  }
  if (op.quantization.given()) {
    add(op.quantization);
  }
}

void DenseAttention::add(const KeyQuantization& quantization) {
  const auto dtype = statistics_dtype(query);
  query = query.to(dtype);
  if (quantization.of_query()) {
    // The ropes are scaled as well: callers divide them before.
    const auto& of_tokens = *quantization.dequant_scale_query;
    const auto factors =
        by_head(axes_of(layout).merged() ? of_tokens : of_tokens.unsqueeze(-1), heads) *
        *quantization.key_antiquant_scale;
    query = query * factors;
    query_rope = (query_rope * factors).contiguous();
  } else if (quantization.by_channel()) {
    query = times_channels(query, *quantization.key_antiquant_scale);
  } else {
    key_scale = with_dense_rows(quantization.key_antiquant_scale->to(dtype));
    value_scale = with_dense_rows(quantization.value_antiquant_scale->to(dtype));
  }
  query = query.contiguous();
}

at::Tensor DenseAttention::times_channels(const at::Tensor& by_head,
                                          const at::Tensor& scale) const {
  const auto of_heads =
      (scale.numel() == 1 ? scale : scale.reshape({key_heads, 1, 1, -1})).to(by_head.scalar_type());
  return (by_head.unflatten(1, {key_heads, group()}) * of_heads).flatten(1, 2);
}

void DenseAttention::read_block_table(const at::Tensor& given) {
  block_table = on_host(given).contiguous();
  for (auto& sequence : sequences) {
    sequence.blocks = block_table.const_data_ptr<int32_t>() + sequence.index * block_table.size(1);
    if (!sequence.empty()) {
      check_blocks(sequence, sequence.kept.begin(0), sequence.kept.end(sequence.queries - 1),
                   key.size(2), key.size(0));
    }
  }
  if (checks_values()) {
    warn_of_cumulative_counts(FusedInferAttentionScore::name, keys_of(sequences), block_table,
                              key.size(2));
  }
}

}  // namespace ascend_attn::cpu
