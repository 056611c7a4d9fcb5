// The aclnn functions that the operators call: the C prototypes of their first phases, without the
// tail (uint64_t* workspaceSize, aclOpExecutor** executor) that all have. The second phase is
// (void* workspace, uint64_t workspaceSize, aclOpExecutor*, aclrtStream) for all.
//
// CANN's headers are not needed to build and its libraries not to load: functions are found by
// name.
//
// `reuses_executor` marks the functions whose executors torch_npu reuses as well. For the others it
// switches that off, and so do we (tests/npu/test_npu_conformance.py records both).
#pragma once

#include <cstdint>

struct aclTensor;
struct aclIntArray;
struct aclOpExecutor;

namespace ascend_attn::aclnn {

using Tensor = const aclTensor*;
using IntArray = const aclIntArray*;
using Text = char*;

struct SparseFlashAttention {
  static constexpr const char* name = "aclnnSparseFlashAttention";
  static constexpr const char* op = "sparse_flash_attention";
  using Prototype = int(Tensor query, Tensor key, Tensor value, Tensor sparse_indices,
                        Tensor block_table, Tensor actual_seq_lengths_query,
                        Tensor actual_seq_lengths_kv, Tensor query_rope, Tensor key_rope,
                        double scale_value, int64_t sparse_block_size, Text layout_query,
                        Text layout_kv, int64_t sparse_mode, int64_t pre_tokens,
                        int64_t next_tokens, int64_t attention_mode, bool return_softmax_lse,
                        Tensor attention_out, Tensor softmax_max, Tensor softmax_sum);
};

struct SparseFlashAttentionGrad {
  static constexpr const char* name = "aclnnSparseFlashAttentionGrad";
  static constexpr const char* op = "sparse_flash_attention_grad";
  using Prototype = int(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, Tensor d_out,
                        Tensor out, Tensor softmax_max, Tensor softmax_sum,
                        Tensor actual_seq_lengths_query, Tensor actual_seq_lengths_kv,
                        Tensor query_rope, Tensor key_rope, double scale_value,
                        int64_t sparse_block_size, Text layout, int64_t sparse_mode,
                        int64_t pre_tokens, int64_t next_tokens, bool deterministic, Tensor d_query,
                        Tensor d_key, Tensor d_value, Tensor d_query_rope, Tensor d_key_rope);
};

struct LightningIndexer {
  static constexpr const char* name = "aclnnLightningIndexer";
  static constexpr const char* op = "lightning_indexer";
  using Prototype = int(Tensor query, Tensor key, Tensor weights, Tensor actual_seq_lengths_query,
                        Tensor actual_seq_lengths_key, Tensor block_table, Text layout_query,
                        Text layout_key, int64_t sparse_count, int64_t sparse_mode,
                        int64_t pre_tokens, int64_t next_tokens, bool return_values,
                        Tensor sparse_indices, Tensor sparse_values);
};

struct LightningIndexerGrad {
  static constexpr const char* name = "aclnnLightningIndexerGrad";
  static constexpr const char* op = "lightning_indexer_grad";
  using Prototype = int(Tensor query, Tensor key, Tensor dy, Tensor sparse_indices, Tensor weights,
                        Tensor actual_seq_q_len, Tensor actual_seq_kv_len, int64_t head_num,
                        Text input_layout, int64_t sparse_mode, int64_t pre_tokens,
                        int64_t next_tokens, bool deterministic, Tensor dq, Tensor dk,
                        Tensor dweights);
};

struct SparseLightningIndexerGradKLLoss {
  static constexpr const char* name = "aclnnSparseLightningIndexerGradKLLoss";
  static constexpr const char* op = "sparse_lightning_indexer_grad_kl_loss";
  using Prototype = int(Tensor query, Tensor key, Tensor query_index, Tensor key_index,
                        Tensor weights, Tensor sparse_indices, Tensor softmax_max,
                        Tensor softmax_sum, Tensor query_rope, Tensor key_rope,
                        IntArray actual_seq_lengths_query, IntArray actual_seq_lengths_key,
                        double scale_value, Text layout, int64_t sparse_mode, int64_t pre_tokens,
                        int64_t next_tokens, bool deterministic, Tensor d_query_index,
                        Tensor d_key_index, Tensor d_weights, Tensor loss);
};

struct FlashAttentionScore {
  static constexpr const char* name = "aclnnFlashAttentionScoreV2";
  static constexpr const char* op = "flash_attention_score";
  static constexpr bool reuses_executor = true;
  using Prototype = int(Tensor query, Tensor key, Tensor value, Tensor real_shift, Tensor drop_mask,
                        Tensor padding_mask, Tensor atten_mask, IntArray prefix,
                        IntArray q_start_idx, IntArray kv_start_idx, double scale_value,
                        double keep_prob, int64_t pre_tokens, int64_t next_tokens, int64_t head_num,
                        Text input_layout, int64_t inner_precise, int64_t sparse_mode,
                        int64_t pse_type, Tensor softmax_max, Tensor softmax_sum,
                        Tensor softmax_out, Tensor attention_out);
};

// Of layout TND, as the gradient below.
struct FlashAttentionVarLenScore {
  static constexpr const char* name = "aclnnFlashAttentionVarLenScoreV2";
  static constexpr const char* op = "flash_attention_score";
  static constexpr bool reuses_executor = true;
  using Prototype = int(Tensor query, Tensor key, Tensor value, Tensor real_shift, Tensor drop_mask,
                        Tensor padding_mask, Tensor atten_mask, IntArray prefix,
                        IntArray actual_seq_q_len, IntArray actual_seq_kv_len, IntArray q_start_idx,
                        IntArray kv_start_idx, double scale_value, double keep_prob,
                        int64_t pre_tokens, int64_t next_tokens, int64_t head_num,
                        Text input_layout, int64_t inner_precise, int64_t sparse_mode,
                        int64_t pse_type, Tensor softmax_max, Tensor softmax_sum,
                        Tensor softmax_out, Tensor attention_out);
};

struct FlashAttentionScoreGrad {
  static constexpr const char* name = "aclnnFlashAttentionScoreGradV2";
  static constexpr const char* op = "flash_attention_score_grad";
  static constexpr bool reuses_executor = true;
  using Prototype = int(Tensor query, Tensor key, Tensor value, Tensor dy, Tensor pse_shift,
                        Tensor drop_mask, Tensor padding_mask, Tensor atten_mask,
                        Tensor softmax_max, Tensor softmax_sum, Tensor softmax_in,
                        Tensor attention_in, IntArray prefix, IntArray q_start_idx,
                        IntArray kv_start_idx, double scale_value, double keep_prob,
                        int64_t pre_tokens, int64_t next_tokens, int64_t head_num,
                        Text input_layout, int64_t inner_precise, int64_t sparse_mode,
                        int64_t pse_type, Tensor dq, Tensor dk, Tensor dv, Tensor dpse);
};

struct FlashAttentionUnpaddingScoreGrad {
  static constexpr const char* name = "aclnnFlashAttentionUnpaddingScoreGradV2";
  static constexpr const char* op = "flash_attention_score_grad";
  static constexpr bool reuses_executor = true;
  using Prototype = int(Tensor query, Tensor key, Tensor value, Tensor dy, Tensor pse_shift,
                        Tensor drop_mask, Tensor padding_mask, Tensor atten_mask,
                        Tensor softmax_max, Tensor softmax_sum, Tensor softmax_in,
                        Tensor attention_in, IntArray prefix, IntArray actual_seq_q_len,
                        IntArray actual_seq_kv_len, IntArray q_start_idx, IntArray kv_start_idx,
                        double scale_value, double keep_prob, int64_t pre_tokens,
                        int64_t next_tokens, int64_t head_num, Text input_layout,
                        int64_t inner_precise, int64_t sparse_mode, int64_t pse_type, Tensor dq,
                        Tensor dk, Tensor dv, Tensor dpse);
};

struct ScatterPaKvCache {
  static constexpr const char* name = "aclnnScatterPaKvCache";
  static constexpr const char* op = "scatter_pa_kv_cache_";
  using Prototype = int(Tensor key, Tensor key_cache, Tensor slot_mapping, Tensor value,
                        Tensor value_cache, Tensor compress_lens, Tensor compress_seq_offset,
                        Tensor seq_lens, Text cache_mode, Text scatter_mode, IntArray strides,
                        IntArray offsets);
};

}  // namespace ascend_attn::aclnn
