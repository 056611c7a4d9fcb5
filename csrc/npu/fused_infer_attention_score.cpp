#include "ops/fused_infer_attention_score.h"

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <limits>

#include "core/sparse_mode.h"
#include "npu/aclnn/product.h"
#include "npu/dense_lists.h"
#include "npu/fused_infer.h"
#include "npu/kernel.h"

namespace ascend_attn::aclnn {
namespace {

constexpr const char* kInfer = FusedInferAttentionScore::name;

constexpr auto aclnn_fused_infer_attention_score_v4 =
    launch_fused_infer<FusedInferAttentionScore, FusedInferV4, 0>;
constexpr auto aclnn_fused_infer_attention_score_v5 =
    launch_fused_infer<FusedInferAttentionScore, FusedInferV5, 1>;

// The tokens of one batch of the queries, in packed layouts of all sequences.
int64_t queries_of(const FusedInferAttentionScore& op) {
  return op.query.size(axes_of(op.infer_layout().inputs).tokens);
}

// Returns whether the device computes a call by its kernel for decoding.
bool is_decoding(const FusedInferAttentionScore& op, const at::Tensor& out) {
  const auto& layout = op.infer_layout();
  return !layout.packed() && !layout.is_pair() && !op.query_rope && queries_of(op) == 1 &&
         out.size(-1) == op.query.size(-1);
}

bool has_full_mask(const FusedInferAttentionScore& op) {
  return op.atten_mask && !has_compressed_mask(static_cast<SparseMode>(op.sparse_mode));
}

// Returns the precision to ask for: rows that the content of a mask masks whole are zero, where a
// sink does not see to that.
int64_t precise_of(const FusedInferAttentionScore& op) {
  return has_full_mask(op) && !op.sink ? op.inner_precise | kCorrectsMaskedRows : op.inner_precise;
}

// Returns a sink in query's dtype, which the device takes alone.
std::optional<at::Tensor> launched_sink(const FusedInferAttentionScore& op) {
  if (!op.sink) {
    return std::nullopt;
  }
  const auto dtype = op.query.scalar_type();
  check_implemented(op.sink->scalar_type() == dtype || !GivenWorkspace::current(), kInfer, "sink",
                    "expected query's dtype in a call whose lengths a graph updates, got ",
                    op.sink->scalar_type());
  return dense(kInfer, op.sink->to(dtype));
}

// Returns num_key_value_heads as given, but 1 for one head: CANN refuses 0 for absorbed MLA.
int64_t launched_key_heads(const FusedInferAttentionScore& op) {
  return op.heads() == 1 ? 1 : op.num_key_value_heads.expect_int();
}

void launch_infer(const FusedInferAttentionScore& op,
                  const FusedInferAttentionScore::Outputs& outputs) {
  const auto& layout = op.infer_layout();
  const auto axes = axes_of(layout.inputs);
  const auto query = dense(kInfer, op.query);
  const auto key = dense(kInfer, op.key);
  const auto value = dense(kInfer, op.value);
  const int64_t queries = queries_of(op);
  const bool decoding = is_decoding(op, std::get<0>(outputs));
  FusedInfer call{.query = query,
                  .key = key,
                  .value = value,
                  .atten_mask = launched_mask(kInfer, mask_of(op), op.sparse_mode, queries == 1),
                  .key_antiquant_scale = dense(kInfer, op.quantization.key_antiquant_scale),
                  .value_antiquant_scale = dense(kInfer, op.quantization.value_antiquant_scale),
                  .key_antiquant_mode = op.quantization.key_antiquant_mode,
                  .value_antiquant_mode = op.quantization.value_antiquant_mode,
                  .dequant_scale_query = dense(kInfer, op.quantization.dequant_scale_query),
                  .query_quant_mode = op.quantization.query_quant_mode,
                  .block_table = dense(kInfer, op.block_table),
                  .query_rope = dense(kInfer, op.query_rope),
                  .key_rope = dense(kInfer, op.key_rope),
                  .sink = launched_sink(op),
                  .num_heads = op.heads().expect_int(),
                  .scale_value = op.scale(),
                  .pre_tokens = within_int32(op.pre_tokens),
                  .next_tokens = within_int32(op.next_tokens),
                  .layout = layout.name,
                  .num_key_value_heads = launched_key_heads(op),
                  .sparse_mode = op.sparse_mode,
                  .inner_precise = precise_of(op),
                  .block_size = op.block_table ? op.page_size().expect_int() : 0,
                  .return_softmax_lse = op.return_softmax_lse,
                  .out = std::get<0>(outputs),
                  .softmax_lse = std::get<1>(outputs)};
  if (layout.packed()) {
    call.query_lengths = integers_of(op.actual_seq_lengths_query.values());
    call.key_lengths = integers_of(op.actual_seq_lengths_key.values());
  } else {
    const int64_t batches = query.size(axes.batch);
    const int64_t keys =
        op.block_table ? op.block_table->size(1) * call.block_size : key.size(axes.tokens);
    if (decoding || op.actual_seq_lengths_query.given()) {
      call.query_lengths = lengths_per_batch(op.actual_seq_lengths_query, batches, queries);
    }
    if (decoding || op.actual_seq_lengths_key.given()) {
      call.key_lengths = lengths_per_batch(op.actual_seq_lengths_key, batches, keys);
    }
    if (decoding) {
      keep_by_lengths(kInfer, call, keys);
    }
  }
  static const bool is_950 = runs_on(k950);
  is_950 ? aclnn_fused_infer_attention_score_v5(call) : aclnn_fused_infer_attention_score_v4(call);
}

// Returns the value of softmax_lse in rows without keys, with its axes.
at::Tensor without_keys(const FusedInferAttentionScore& op, const at::Tensor& softmax_lse) {
  if (!op.sink) {
    return at::scalar_tensor(-kInfinity, softmax_lse.options());
  }
  const auto sink = op.sink->to(softmax_lse.scalar_type());
  return op.infer_layout().packed() ? sink.view({1, -1, 1}) : sink.view({1, -1, 1, 1});
}

// Returns whether a row of the outputs may have no key, or belongs to no sequence.
bool may_lack_keys(const FusedInferAttentionScore& op, c10::ArrayRef<Sequence> sequences) {
  if (has_full_mask(op)) {
    return true;
  }
  const auto mode = static_cast<SparseMode>(op.sparse_mode);
  const int64_t queries = queries_of(op);
  return std::ranges::any_of(sequences, [&](const Sequence& sequence) {
    auto kept = KeptKeys{sequence.keys};
    if (op.masked()) {
      kept = kept_keys(mode, sequence.queries, sequence.keys, op.pre_tokens, op.next_tokens,
                       /*prefix=*/0, /*is_band=*/false);
    }
    const auto is_dead = [&](int64_t row) { return kept.begin(row) == kept.end(row); };
    // A band leaves out rows at the beginning or at the end.
    return (!op.infer_layout().packed() && sequence.queries < queries) ||
           (sequence.queries > 0 && (is_dead(0) || is_dead(sequence.queries - 1)));
  });
}

// Writes softmax_lse of rows without keys. The device marks them with infinity or, for decoding,
// with its lowest number, and leaves the sink out.
void mark_rows_without_keys(const FusedInferAttentionScore& op, const at::Tensor& softmax_lse) {
  const auto sequences = op.sequences();
  if (!may_lack_keys(op, sequences)) {
    return;
  }
  const auto dead = softmax_lse.abs().ge(std::numeric_limits<float>::max());
  softmax_lse.copy_(at::where(dead, without_keys(op, softmax_lse), softmax_lse));
  if (!op.sink || op.infer_layout().packed()) {
    return;
  }
  // Rows behind a sequence have no sink either.
  const int64_t queries = queries_of(op);
  for (const auto& sequence : sequences) {
    if (sequence.queries < queries) {
      softmax_lse[sequence.batch]
          .narrow(1, sequence.queries, queries - sequence.queries)
          .fill_(-kInfinity);
    }
  }
}

void fused_infer_attention_score(const FusedInferAttentionScore& op,
                                 FusedInferAttentionScore::Outputs& outputs) {
  if (op.query.numel() == 0) {
    return;
  }
  const bool updated = GivenWorkspace::current();
  check_implemented(
      !updated || !op.return_softmax_lse || !op.sink || op.infer_layout().packed(), kInfer,
      "return_softmax_lse",
      "expected False beside a sink outside TND, in a call whose lengths a graph updates, got "
      "True");
  const auto& [out, softmax_lse] = outputs;
  if (op.key.numel() == 0) {
    fill_output(out, 0);
    fill_output(softmax_lse, kInfinity);
  } else {
    launch_infer(op, outputs);
  }
  // A graph that launches the call again does this behind every launch, by the marks alone.
  if (op.return_softmax_lse && !updated) {
    mark_rows_without_keys(op, softmax_lse);
  }
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) {
  register_kernel_and_relaunch<FusedInferAttentionScore, fused_infer_attention_score>(m);
}

}  // namespace
}  // namespace ascend_attn::aclnn
