#include "npu/flash_attention_extended.h"

#include <cstdint>
#include <optional>
#include <string_view>

#include "npu/aclnn/library.h"
#include "npu/aclnn/product.h"
#include "npu/dense_lists.h"
#include "npu/kernel.h"
#include "npu/sink_and_ropes.h"

namespace ascend_attn::aclnn {
namespace {

using ScoreV3Prototype = int(AclTensor query, AclTensor key, AclTensor value, AclTensor real_shift,
                             AclTensor drop_mask, AclTensor padding_mask, AclTensor atten_mask,
                             AclTensor sink, AclIntArray prefix, AclIntArray q_start_idx,
                             AclIntArray kv_start_idx, double scale_value, double keep_prob,
                             int64_t pre_tokens, int64_t next_tokens, int64_t head_num,
                             char* input_layout, int64_t inner_precise, int64_t sparse_mode,
                             int64_t pse_type, AclTensor softmax_max, AclTensor softmax_sum,
                             AclTensor softmax_out, AclTensor attention_out);

using PackedScoreV5Prototype = int(
    AclTensor query, AclTensor query_rope, AclTensor key, AclTensor key_rope, AclTensor value,
    AclTensor real_shift, AclTensor drop_mask, AclTensor padding_mask, AclTensor atten_mask,
    AclTensor sink, AclIntArray prefix, AclIntArray actual_seq_q_len, AclIntArray actual_seq_kv_len,
    AclIntArray q_start_idx, AclIntArray kv_start_idx, double scale_value, double keep_prob,
    int64_t pre_tokens, int64_t next_tokens, int64_t head_num, char* input_layout,
    int64_t inner_precise, int64_t sparse_mode, int64_t pse_type, char* softmax_out_layout,
    AclTensor softmax_max, AclTensor softmax_sum, AclTensor softmax_out, AclTensor attention_out);

using ScoreV4Prototype = int(AclTensor query, AclTensor key, AclTensor value, AclTensor real_shift,
                             AclTensor drop_mask, AclTensor padding_mask, AclTensor atten_mask,
                             AclTensor query_rope, AclTensor key_rope, AclTensor d_scale_q,
                             AclTensor d_scale_k, AclTensor d_scale_v, AclTensor sink,
                             AclIntArray prefix, AclIntArray actual_seq_q_len,
                             AclIntArray actual_seq_kv_len, AclIntArray q_start_idx,
                             AclIntArray kv_start_idx, double scale_value, double keep_prob,
                             int64_t pre_tokens, int64_t next_tokens, int64_t head_num,
                             char* input_layout, int64_t inner_precise, int64_t sparse_mode,
                             int64_t out_dtype, int64_t pse_type, char* softmax_out_layout,
                             int64_t seed, int64_t offset, AclTensor softmax_max,
                             AclTensor softmax_sum, AclTensor softmax_out, AclTensor attention_out);

using ScoreGradV3Prototype = int(AclTensor query, AclTensor key, AclTensor value, AclTensor dy,
                                 AclTensor pse_shift, AclTensor drop_mask, AclTensor padding_mask,
                                 AclTensor atten_mask, AclTensor softmax_max, AclTensor softmax_sum,
                                 AclTensor softmax_in, AclTensor attention_in, AclTensor sink,
                                 AclIntArray prefix, AclIntArray q_start_idx,
                                 AclIntArray kv_start_idx, double scale_value, double keep_prob,
                                 int64_t pre_tokens, int64_t next_tokens, int64_t head_num,
                                 char* input_layout, int64_t inner_precise, int64_t sparse_mode,
                                 int64_t pse_type, AclTensor dq, AclTensor dk, AclTensor dv,
                                 AclTensor dpse, AclTensor dsink);

using PackedScoreGradV5Prototype =
    int(AclTensor query, AclTensor query_rope, AclTensor key, AclTensor key_rope, AclTensor value,
        AclTensor dy, AclTensor pse_shift, AclTensor drop_mask, AclTensor padding_mask,
        AclTensor atten_mask, AclTensor softmax_max, AclTensor softmax_sum, AclTensor softmax_in,
        AclTensor attention_in, AclTensor sink, AclIntArray prefix, AclIntArray actual_seq_q_len,
        AclIntArray actual_seq_kv_len, AclIntArray q_start_idx, AclIntArray kv_start_idx,
        double scale_value, double keep_prob, int64_t pre_tokens, int64_t next_tokens,
        int64_t head_num, char* input_layout, int64_t inner_precise, int64_t sparse_mode,
        int64_t pse_type, char* softmax_in_layout, AclTensor dq, AclTensor dq_rope, AclTensor dk,
        AclTensor dk_rope, AclTensor dv, AclTensor dpse, AclTensor dsink);

using ScoreGradV4Prototype =
    int(AclTensor query, AclTensor key, AclTensor value, AclTensor dy, AclTensor pse_shift,
        AclTensor drop_mask, AclTensor padding_mask, AclTensor atten_mask, AclTensor softmax_max,
        AclTensor softmax_sum, AclTensor softmax_in, AclTensor attention_in, AclTensor sink,
        AclTensor query_rope, AclTensor key_rope, AclTensor d_scale_q, AclTensor d_scale_k,
        AclTensor d_scale_v, AclTensor d_scale_dy, AclTensor d_scale_o, AclIntArray prefix,
        AclIntArray actual_seq_q_len, AclIntArray actual_seq_kv_len, AclIntArray q_start_idx,
        AclIntArray kv_start_idx, double scale_value, double keep_prob, int64_t pre_tokens,
        int64_t next_tokens, int64_t head_num, char* input_layout, char* softmax_in_layout,
        int64_t inner_precise, int64_t sparse_mode, int64_t pse_type, int64_t seed, int64_t offset,
        int64_t out_dtype, AclTensor dq, AclTensor dk, AclTensor dv, AclTensor dq_rope,
        AclTensor dk_rope, AclTensor dpse, AclTensor dsink);

constexpr Launcher<FlashAttentionScore, PackedScoreV5Prototype, 2> aclnn_packed_score_v5{
    .reuses_executor = true};
constexpr Launcher<FlashAttentionScore, ScoreV3Prototype, 3> aclnn_score_v3{.reuses_executor =
                                                                                true};
constexpr Launcher<FlashAttentionScore, ScoreV4Prototype, 4> aclnn_score_v4{.reuses_executor =
                                                                                true};
constexpr Launcher<FlashAttentionScoreExtendedGrad, PackedScoreGradV5Prototype, 0>
    aclnn_packed_score_grad_v5{.reuses_executor = true};
constexpr Launcher<FlashAttentionScoreExtendedGrad, ScoreGradV3Prototype, 1> aclnn_score_grad_v3{
    .reuses_executor = true};
constexpr Launcher<FlashAttentionScoreExtendedGrad, ScoreGradV4Prototype, 2> aclnn_score_grad_v4{
    .reuses_executor = true};

// Statistics of layout TND as V2 has them: (N, Sq, 8) of one sequence after another.
constexpr std::string_view kBySequence;
// V4 draws a dropout mask from these where it is given none.
constexpr int64_t kSeed = 0;
constexpr int64_t kOffset = 0;
constexpr int64_t kDtypeOfQuery = 0;

bool runs_v4() {
  static const bool runs = runs_on(k950.since(Cann::v9_1));
  return runs;
}

bool is_half(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

// Returns whether the kernels of A2 and A3 read ropes where they lie. Beside ropes, CANN's host
// code pads nothing, and takes a mask alone.
bool reads_packed_ropes(const at::Tensor& query, const at::Tensor& value,
                        const FlashAttentionOptions& options, const at::Tensor& rope) {
  constexpr int64_t kPrefixCompressed = 6;
  constexpr int64_t kFirstPaddedTo128 = 196;
  const int64_t size = query.size(-1);
  return options.layout == Layout::TND && query.scalar_type() == at::kBFloat16 &&
         options.masked() && options.sparse_mode != kPrefixCompressed && !options.pse_shift &&
         !options.drop_mask && rope.size(-1) <= size && value.size(-1) == size &&
         size % (size < kFirstPaddedTo128 ? 16 : 128) == 0;
}

// Returns whether ScoreV4 has a kernel for these sizes.
bool reads_ropes_of_v4(const at::Tensor& query, const FlashAttentionOptions& options,
                       const at::Tensor& rope) {
  constexpr int64_t kSize = 128;
  constexpr int64_t kRopeSize = 64;
  const int64_t heads = axes_of(options.layout.value()).merged() ? options.heads().expect_int() : 1;
  return is_half(query) && query.size(-1) == heads * kSize && rope.size(-1) == heads * kRopeSize;
}

template <typename Op>
TakenByDevice taken(const Op& op, bool has_packed, bool has_dense, Devices of_sink) {
  TakenByDevice device;
  const auto& extra = op.extra;
  if (!extra.given() || op.query.numel() == 0) {
    return device;
  }
  if (runs_v4()) {
    device.ropes = extra.query_rope && reads_ropes_of_v4(op.query, op.options, *extra.query_rope);
    device.sink = extra.sink && is_half(op.query);
    return device;
  }
  const bool packed = op.options.layout == Layout::TND;
  if (!runs_on(kA2A3) || !(packed ? has_packed : has_dense)) {
    return device;
  }
  device.ropes =
      extra.query_rope && reads_packed_ropes(op.query, op.value, op.options, *extra.query_rope);
  device.sink = extra.sink && is_half(op.query) && runs_on(of_sink);
  return device;
}

std::optional<at::Tensor> if_taken(bool taken, const std::optional<at::Tensor>& tensor) {
  return taken ? tensor : std::nullopt;
}

}  // namespace

TakenByDevice taken_by_device(const FlashAttentionScore& op) {
  static const bool has_packed = has_function(op.functions[2]);
  static const bool has_dense = has_function(op.functions[3]);
  return taken(op, has_packed, has_dense, kA2A3);
}

// Before CANN 9.1 the kernel's sum for the sink's gradient multiplies sequence lengths in 32 bits,
// and drops its last part where the size divides evenly.
TakenByDevice taken_by_device(const FlashAttentionScoreExtendedGrad& op) {
  static const bool has_packed = has_function(op.functions[0]);
  static const bool has_dense = has_function(op.functions[1]);
  return taken(op, has_packed, has_dense, kA2A3.since(Cann::v9_1));
}

void launch_extended(const FlashAttentionScore& op, TakenByDevice device,
                     const FlashAttentionScore::Outputs& outputs) {
  const auto& [out, softmax_max, softmax_sum] = outputs;
  const auto& o = op.options;
  const DenseLists lists(op.query, op.key, o);
  const auto atten_mask = launched_mask(op.name, op.query, op.key, o, lists);
  const auto sink = if_taken(device.sink, op.extra.sink);
  const auto& query_rope = op.extra.query_rope;
  const auto& key_rope = op.extra.key_rope;
  // Never written: the functions reserve this output.
  const auto softmax_out = new_tensor({0}, op.query.options());
  const auto pre_tokens = within_int32(o.pre_tokens);
  const auto next_tokens = within_int32(o.next_tokens);
  const auto heads = o.heads().expect_int();
  if (runs_v4()) {
    aclnn_score_v4(op.query, op.key, op.value, o.pse_shift, o.drop_mask, std::nullopt, atten_mask,
                   query_rope, key_rope, std::nullopt, std::nullopt, std::nullopt, sink,
                   lists.prefix, lists.query_ends, lists.key_ends, o.q_start_idx, o.kv_start_idx,
                   o.scale(), o.keep_prob, pre_tokens, next_tokens, heads, o.layout.text(),
                   o.inner_precise, o.sparse_mode, kDtypeOfQuery, o.pse_type, kBySequence, kSeed,
                   kOffset, softmax_max, softmax_sum, softmax_out, out);
  } else if (o.layout == Layout::TND) {
    aclnn_packed_score_v5(op.query, query_rope, op.key, key_rope, op.value, o.pse_shift,
                          o.drop_mask, std::nullopt, atten_mask, sink, lists.prefix,
                          lists.query_ends, lists.key_ends, o.q_start_idx, o.kv_start_idx,
                          o.scale(), o.keep_prob, pre_tokens, next_tokens, heads, o.layout.text(),
                          o.inner_precise, o.sparse_mode, o.pse_type, kBySequence, softmax_max,
                          softmax_sum, softmax_out, out);
  } else {
    aclnn_score_v3(op.query, op.key, op.value, o.pse_shift, o.drop_mask, std::nullopt, atten_mask,
                   sink, lists.prefix, o.q_start_idx, o.kv_start_idx, o.scale(), o.keep_prob,
                   pre_tokens, next_tokens, heads, o.layout.text(), o.inner_precise, o.sparse_mode,
                   o.pse_type, softmax_max, softmax_sum, softmax_out, out);
  }
}

void launch_extended_grad(const FlashAttentionScoreExtendedGrad& op, TakenByDevice device,
                          const FlashAttentionScoreExtendedGrad::Outputs& outputs) {
  const auto& [dq, dk, dv, d_sink_out, dq_rope_out, dk_rope_out, no_dpse] = outputs;
  const auto& o = op.options;
  const DenseLists lists(op.query, op.key, o);
  const auto atten_mask = launched_mask(op.name, op.query, op.key, o, lists);
  const auto sink = if_taken(device.sink, op.extra.sink);
  const auto d_sink = if_taken(device.sink, d_sink_out);
  const auto& query_rope = op.extra.query_rope;
  const auto& key_rope = op.extra.key_rope;
  const auto dq_rope = if_taken(device.ropes, dq_rope_out);
  const auto dk_rope = if_taken(device.ropes, dk_rope_out);
  // Never written, since the functions have no gradient of pse_shift.
  const auto dpse = o.pse_shift ? new_like(*o.pse_shift) : new_tensor({0}, op.query.options());
  const auto pre_tokens = within_int32(o.pre_tokens);
  const auto next_tokens = within_int32(o.next_tokens);
  const auto heads = o.heads().expect_int();
  if (runs_v4()) {
    aclnn_score_grad_v4(op.query, op.key, op.value, op.dy, o.pse_shift, o.drop_mask, std::nullopt,
                        atten_mask, op.softmax_max, op.softmax_sum, std::nullopt, op.attention_in,
                        sink, query_rope, key_rope, std::nullopt, std::nullopt, std::nullopt,
                        std::nullopt, std::nullopt, lists.prefix, lists.query_ends, lists.key_ends,
                        o.q_start_idx, o.kv_start_idx, o.scale(), o.keep_prob, pre_tokens,
                        next_tokens, heads, o.layout.text(), kBySequence, o.inner_precise,
                        o.sparse_mode, o.pse_type, kSeed, kOffset, kDtypeOfQuery, dq, dk, dv,
                        dq_rope, dk_rope, dpse, d_sink);
  } else if (o.layout == Layout::TND) {
    Fills fills;
    clear_padding(fills, lists.query_ends, dq);
    clear_padding(fills, lists.key_ends, dk);
    clear_padding(fills, lists.key_ends, dv);
    if (device.ropes) {
      clear_padding(fills, lists.query_ends, dq_rope_out);
      clear_padding(fills, lists.key_ends, dk_rope_out);
    }
    aclnn_packed_score_grad_v5.with(fills)(
        op.query, query_rope, op.key, key_rope, op.value, op.dy, o.pse_shift, o.drop_mask,
        std::nullopt, atten_mask, op.softmax_max, op.softmax_sum, std::nullopt, op.attention_in,
        sink, lists.prefix, lists.query_ends, lists.key_ends, o.q_start_idx, o.kv_start_idx,
        o.scale(), o.keep_prob, pre_tokens, next_tokens, heads, o.layout.text(), o.inner_precise,
        o.sparse_mode, o.pse_type, kBySequence, dq, dq_rope, dk, dk_rope, dv, dpse, d_sink);
  } else {
    aclnn_score_grad_v3(op.query, op.key, op.value, op.dy, o.pse_shift, o.drop_mask, std::nullopt,
                        atten_mask, op.softmax_max, op.softmax_sum, std::nullopt, op.attention_in,
                        sink, lists.prefix, o.q_start_idx, o.kv_start_idx, o.scale(), o.keep_prob,
                        pre_tokens, next_tokens, heads, o.layout.text(), o.inner_precise,
                        o.sparse_mode, o.pse_type, dq, dk, dv, dpse, d_sink);
  }
}

}  // namespace ascend_attn::aclnn
