"""The schemas of others' operators: torch_npu's of this release, vLLM-Ascend's (_C_ascend) and
those of CANN's own package, cann_ops_transformer.

Where one is installed its own are in force; these serve where it is not.
"""

from __future__ import annotations

import re

RELEASE = "2.13.0"
RELEASE_OF_CANN = "9.1.0"

# torch_npu loads the library of torch.ops.atb where NNAL is installed.
_SCHEMAS = """\
npu::npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout,
    Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1.0,
    float keep_prob=1.0, int pre_tockens=2147483647, int next_tockens=2147483647,
    int inner_precise=0, int[]? prefix=None, int[]? actual_seq_qlen=None,
    int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False,
    str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, int offset=0)
    -> (Tensor, Tensor, Tensor, Tensor, int, int, int)
npu::npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num,
    str input_layout, *, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None,
    Tensor? softmax_max=None, Tensor? softmax_sum=None, Tensor? softmax_in=None,
    Tensor? attention_in=None, float scale_value=1.0, float keep_prob=1.0,
    int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int seed=0,
    int offset=0, int numels=0, int[]? prefix=None, int[]? actual_seq_qlen=None,
    int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False,
    str softmax_layout="", Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)
npu::npu_fusion_attention_v2(Tensor query, Tensor key, Tensor value, int head_num, str input_layout,
    *, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None,
    Tensor? query_rope=None, Tensor? key_rope=None, float scale=1.0, float keep_prob=1.0,
    int pre_tokens=2147483647, int next_tokens=2147483647, int inner_precise=0, int[]? prefix=None,
    int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0,
    bool gen_mask_parallel=True, bool sync=False, int pse_type=1, int[]? q_start_idx=None,
    int[]? kv_start_idx=None, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None,
    int seed=0, int offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)
npu::npu_fusion_attention_grad_v2(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num,
    str input_layout, *, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None,
    Tensor? softmax_max=None, Tensor? softmax_sum=None, Tensor? softmax_in=None,
    Tensor? attention_in=None, Tensor? query_rope=None, Tensor? key_rope=None,
    float scale_value=1.0, float keep_prob=1.0, int pre_tokens=2147483647,
    int next_tokens=2147483647, int inner_precise=0, int seed=0, int offset=0, int numels=0,
    int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None,
    int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, int pse_type=1,
    int[]? q_start_idx=None, int[]? kv_start_idx=None, str softmax_layout="", Tensor? sink=None)
    -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)
npu::npu_fusion_attention_v3(Tensor query, Tensor key, Tensor value, int head_num, str input_layout,
    Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1.0,
    float keep_prob=1.0, int pre_tockens=2147483647, int next_tockens=2147483647,
    int inner_precise=0, SymInt[]? prefix=None, Tensor? actual_seq_qlen=None,
    Tensor? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False,
    str softmax_layout="", Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)
npu::npu_fusion_attention_grad_v3(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num,
    str input_layout, *, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None,
    Tensor? softmax_max=None, Tensor? softmax_sum=None, Tensor? softmax_in=None,
    Tensor? attention_in=None, float scale_value=1.0, float keep_prob=1.0,
    int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, Tensor? seed=None,
    Tensor? offset=None, SymInt[]? prefix=None, Tensor? actual_seq_qlen=None,
    Tensor? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False,
    str softmax_layout="", Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)
npu::npu_prompt_flash_attention(Tensor query, Tensor key, Tensor value, *,
    Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? pse_shift=None,
    int[]? actual_seq_lengths=None, Tensor? deq_scale1=None, Tensor? quant_scale1=None,
    Tensor? deq_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, int num_heads=1,
    float scale_value=1.0, int pre_tokens=2147483647, int next_tokens=0, str input_layout="BSH",
    int num_key_value_heads=0, int[]? actual_seq_lengths_kv=None, int sparse_mode=0) -> Tensor
npu::npu_incre_flash_attention(Tensor query, Tensor key, Tensor value, *, Tensor? padding_mask=None,
    Tensor? atten_mask=None, Tensor? pse_shift=None, SymInt[]? actual_seq_lengths=None,
    Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? block_table=None,
    Tensor? dequant_scale1=None, Tensor? quant_scale1=None, Tensor? dequant_scale2=None,
    Tensor? quant_scale2=None, Tensor? quant_offset2=None, Tensor? kv_padding_size=None,
    int num_heads=1, float scale_value=1.0, str input_layout="BSH", int num_key_value_heads=0,
    int block_size=0, int inner_precise=1) -> Tensor
npu::npu_fused_infer_attention_score(Tensor query, Tensor key, Tensor value, *,
    Tensor? pse_shift=None, Tensor? atten_mask=None, SymInt[]? actual_seq_lengths=None,
    SymInt[]? actual_seq_lengths_kv=None, Tensor? dequant_scale1=None, Tensor? quant_scale1=None,
    Tensor? dequant_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None,
    Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? key_antiquant_scale=None,
    Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None,
    Tensor? value_antiquant_offset=None, Tensor? block_table=None, Tensor? query_padding_size=None,
    Tensor? kv_padding_size=None, Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None,
    SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? key_rope=None,
    Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1.0,
    int pre_tokens=2147483647, int next_tokens=2147483647, str input_layout="BSH",
    int num_key_value_heads=0, int sparse_mode=0, int inner_precise=0, int block_size=0,
    int antiquant_mode=0, int key_antiquant_mode=0, int value_antiquant_mode=0,
    bool softmax_lse_flag=False) -> (Tensor, Tensor)
npu::npu_fused_infer_attention_score_v2(Tensor query, Tensor key, Tensor value, *,
    Tensor? query_rope=None, Tensor? key_rope=None, Tensor? pse_shift=None, Tensor? atten_mask=None,
    SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_kvlen=None, Tensor? block_table=None,
    Tensor? dequant_scale_query=None, Tensor? dequant_scale_key=None,
    Tensor? dequant_offset_key=None, Tensor? dequant_scale_value=None,
    Tensor? dequant_offset_value=None, Tensor? dequant_scale_key_rope=None,
    Tensor? quant_scale_out=None, Tensor? quant_offset_out=None, Tensor? quant_scale_p=None,
    Tensor? learnable_sink=None, int num_query_heads=1, int num_key_value_heads=0,
    float softmax_scale=1.0, int pre_tokens=2147483647, int next_tokens=2147483647,
    str input_layout="BSH", int sparse_mode=0, int block_size=0, int query_quant_mode=0,
    int key_quant_mode=0, int value_quant_mode=0, int inner_precise=0,
    bool return_softmax_lse=False, int? query_dtype=None, int? key_dtype=None,
    int? value_dtype=None, int? query_rope_dtype=None, int? key_rope_dtype=None,
    int? key_shared_prefix_dtype=None, int? value_shared_prefix_dtype=None,
    int? dequant_scale_query_dtype=None, int? dequant_scale_key_dtype=None,
    int? dequant_scale_value_dtype=None, int? dequant_scale_key_rope_dtype=None,
    int? out_dtype=None) -> (Tensor, Tensor)
npu::npu_sparse_flash_attention(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices,
    float scale_value, *, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None,
    Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None,
    int sparse_block_size=1, str layout_query="BSND", str layout_kv="BSND", int sparse_mode=3,
    int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int attention_mode=0,
    bool return_softmax_lse=False, Tensor? sinks=None) -> (Tensor, Tensor, Tensor)
npu::npu_sparse_flash_attention_grad(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices,
    Tensor d_out, Tensor out, Tensor softmax_max, Tensor softmax_sum, float scale_value,
    int sparse_block_size, Tensor? query_rope=None, Tensor? key_rope=None,
    Tensor? actual_seq_qlen=None, Tensor? actual_seq_kvlen=None, str? layout="BSND",
    int? sparse_mode=3, int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807,
    int? attention_mode=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)
npu::npu_kv_quant_sparse_flash_attention(Tensor query, Tensor key, Tensor value,
    Tensor sparse_indices, float scale_value, int key_quant_mode, int value_quant_mode, *,
    Tensor? key_dequant_scale=None, Tensor? value_dequant_scale=None, Tensor? block_table=None,
    Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None,
    int sparse_block_size=1, str layout_query="BSND", str layout_kv="BSND", int sparse_mode=3,
    int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int attention_mode=0,
    int quant_scale_repo_mode=1, int tile_size=128, int rope_head_dim=64, int? key_dtype=None,
    int? value_dtype=None) -> Tensor
npu::npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *,
    Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None,
    Tensor? block_table=None, str layout_query="BSND", str layout_key="BSND", int sparse_count=2048,
    int sparse_mode=3, int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807,
    bool return_value=False) -> (Tensor, Tensor)
npu::npu_lightning_indexer_grad(Tensor query, Tensor key, Tensor dy, Tensor sparse_indices,
    Tensor weights, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None,
    str? layout="BSND", int? sparse_mode=3, int? pre_tokens=9223372036854775807,
    int? next_tokens=9223372036854775807) -> (Tensor, Tensor, Tensor)
npu::npu_quant_lightning_indexer(Tensor query, Tensor key, Tensor weights,
    Tensor query_dequant_scale, Tensor key_dequant_scale, int query_quant_mode, int key_quant_mode,
    *, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None,
    Tensor? block_table=None, str layout_query="BSND", str layout_key="BSND", int sparse_count=2048,
    int sparse_mode=3, int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807,
    int? query_dtype=None, int? key_dtype=None) -> Tensor
npu::npu_sparse_lightning_indexer_grad_kl_loss(Tensor query, Tensor key, Tensor query_index,
    Tensor key_index, Tensor weights, Tensor sparse_indices, Tensor softmax_max, Tensor softmax_sum,
    float scale_value, *, Tensor? query_rope=None, Tensor? key_rope=None,
    SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_klen=None, str? layout="BSND",
    int? sparse_mode=3, int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807,
    Tensor? sinks=None) -> (Tensor, Tensor, Tensor, Tensor)
npu::npu_scatter_pa_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,
    Tensor slot_mapping, *, Tensor? compress_lens=None, Tensor? compress_seq_offsets=None,
    Tensor? seq_lens=None, str? cache_mode="PA_NZ") -> ()
npu::npu_attention_update(Tensor[] lse, Tensor[] local_out, int update_type) -> (Tensor, Tensor)
npu::npu_ring_attention_update(Tensor prev_attn_out, Tensor prev_softmax_max,
    Tensor prev_softmax_sum, Tensor cur_attn_out, Tensor cur_softmax_max, Tensor cur_softmax_sum, *,
    Tensor? actual_seq_qlen=None, str input_layout="SBH", str input_softmax_layout="") -> (Tensor,
    Tensor, Tensor)
npu::npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)
npu::npu_rms_norm_backward(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)
npu::npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor,
    Tensor)
npu::npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode="half", Tensor? rotate=None)
    -> Tensor
npu::npu_rotary_mul_backward(Tensor grad, Tensor input, Tensor r1, Tensor r2,
    str rotary_mode="half") -> (Tensor, Tensor, Tensor)
npu::npu_swiglu(Tensor input, int dim=-1) -> Tensor
npu::npu_swiglu_backward(Tensor grad_output, Tensor input, int dim=-1) -> Tensor
atb::_npu_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,
    Tensor slot_indices) -> ()
atb::_npu_paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads,
    int num_heads, float scale_value, Tensor block_table, Tensor context_lens, Tensor(a!) out, *,
    Tensor? workspace=None) -> ()
atb::_npu_paged_attention_get_workspace(Tensor query, Tensor key_cache, Tensor value_cache,
    int num_kv_heads, int num_heads, float scale_value, Tensor block_table, Tensor context_lens,
    Tensor(a!) out) -> Tensor
_C_ascend::npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *,
    Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None,
    Tensor? block_table=None, str layout_query="BSND", str layout_key="BSND", int sparse_count=2048,
    int sparse_mode=3, int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807,
    bool return_value=False) -> (Tensor, Tensor)
_C_ascend::npu_lightning_indexer_quant(Tensor query, Tensor key, Tensor weights,
    Tensor query_dequant_scale, Tensor key_dequant_scale, *, Tensor? actual_seq_lengths_query=None,
    Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, int query_quant_mode=0,
    int key_quant_mode=0, str layout_query="BSND", str layout_key="BSND", int sparse_count=2048,
    int sparse_mode=3) -> Tensor
_C_ascend::npu_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices,
    float scale_value, *, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None,
    Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None,
    int sparse_block_size=1, str layout_query="BSND", str layout_kv="BSND", int sparse_mode=3,
    int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int attention_mode=2,
    bool return_softmax_lse=False) -> (Tensor, Tensor, Tensor)
_C_ascend::npu_kv_quant_sparse_flash_attention(Tensor query, Tensor key, Tensor value,
    Tensor sparse_indices, float scale_value, int key_quant_mode=1, int value_quant_mode=1, *,
    Tensor? key_dequant_scale=None, Tensor? value_dequant_scale=None, Tensor? block_table=None,
    Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None,
    int sparse_block_size=1, str layout_query="BSND", str layout_kv="BSND", int sparse_mode=3,
    int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int attention_mode=2,
    int quant_scale_repo_mode=1, int tile_size=128, int rope_head_dim=64,
    bool return_softmax_lse=False) -> (Tensor, Tensor, Tensor)
_C_ascend::npu_sparse_attn_sharedkv(Tensor q, *, Tensor? ori_kv=None, Tensor? cmp_kv=None,
    Tensor? ori_sparse_indices=None, Tensor? cmp_sparse_indices=None, Tensor? ori_block_table=None,
    Tensor? cmp_block_table=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None,
    Tensor? cu_seqlens_cmp_kv=None, Tensor? seqused_q=None, Tensor? seqused_kv=None,
    Tensor? sinks=None, Tensor? metadata=None, float softmax_scale=0, int cmp_ratio=0,
    int ori_mask_mode=4, int cmp_mask_mode=3, int ori_win_left=128, int ori_win_right=0,
    str layout_q="BSND", str layout_kv="PA_ND", bool return_softmax_lse=False) -> (Tensor, Tensor)
_C_ascend::npu_sparse_attn_sharedkv_metadata(int num_heads_q, int num_heads_kv, int head_dim,
    Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None, Tensor? cu_seqlens_cmp_kv=None,
    Tensor? seqused_q=None, Tensor? seqused_kv=None, int batch_size=0, int max_seqlen_q=0,
    int max_seqlen_kv=0, int ori_topk=0, int cmp_topk=0, int cmp_ratio=4, int ori_mask_mode=4,
    int cmp_mask_mode=3, int ori_win_left=128, int ori_win_right=0, str layout_q="BSND",
    str layout_kv="PA_ND", bool has_ori_kv=True, bool has_cmp_kv=True, str device="npu") -> Tensor
cann_ops_transformer::lightning_indexer_metadata(int num_heads_q, int num_heads_k, int head_dim,
    int topk, *, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None,
    Tensor? seqused_k=None, Tensor? cmp_residual_k=None, int? batch_size=None,
    int? max_seqlen_q=None, int? max_seqlen_k=None, str? layout_q=None, str? layout_k=None,
    int? mask_mode=None, int? cmp_ratio=None) -> Tensor
cann_ops_transformer::lightning_indexer(Tensor q, Tensor k, Tensor w, int topk, *,
    Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None,
    Tensor? seqused_k=None, Tensor? cmp_residual_k=None, Tensor? block_table=None,
    Tensor? output_idx_offset=None, Tensor? metadata=None, int max_seqlen_q=-1, str layout_q="BSND",
    str layout_k="BSND", int mask_mode=0, int cmp_ratio=1, int return_value=0) -> (Tensor, Tensor)
cann_ops_transformer::sparse_flash_mla_metadata(int num_heads_q, int num_heads_kv, int head_dim, *,
    Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None, Tensor? cu_seqlens_cmp_kv=None,
    Tensor? seqused_q=None, Tensor? seqused_ori_kv=None, Tensor? seqused_cmp_kv=None,
    Tensor? cmp_residual_kv=None, Tensor? ori_topk_length=None, Tensor? cmp_topk_length=None,
    int? batch_size=None, int? max_seqlen_q=None, int? max_seqlen_ori_kv=None,
    int? max_seqlen_cmp_kv=None, int? ori_topk=None, int? cmp_topk=None, int? cmp_ratio=None,
    int? ori_mask_mode=None, int? cmp_mask_mode=None, int? ori_win_left=None,
    int? ori_win_right=None, str? layout_q=None, str? layout_kv=None, bool? has_ori_kv=None,
    bool? has_cmp_kv=None) -> Tensor
cann_ops_transformer::sparse_flash_mla(Tensor q, *, Tensor? ori_kv=None, Tensor? cmp_kv=None,
    Tensor? ori_sparse_indices=None, Tensor? cmp_sparse_indices=None, Tensor? ori_block_table=None,
    Tensor? cmp_block_table=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None,
    Tensor? cu_seqlens_cmp_kv=None, Tensor? seqused_q=None, Tensor? seqused_ori_kv=None,
    Tensor? seqused_cmp_kv=None, Tensor? cmp_residual_kv=None, Tensor? ori_topk_length=None,
    Tensor? cmp_topk_length=None, Tensor? sinks=None, Tensor? metadata=None,
    float softmax_scale=1.0, int cmp_ratio=1, int ori_mask_mode=4, int cmp_mask_mode=3,
    int ori_win_left=127, int ori_win_right=0, str layout_q="BSND", str layout_kv="BSND",
    int topk_value_mode=1, bool return_softmax_lse=False) -> (Tensor, Tensor)
cann_ops_transformer::sparse_flash_mla_grad_metadata(int num_heads_q, int num_heads_kv,
    int head_dim, *, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None,
    Tensor? cu_seqlens_cmp_kv=None, Tensor? seqused_q=None, Tensor? seqused_ori_kv=None,
    Tensor? seqused_cmp_kv=None, Tensor? cmp_residual_kv=None, Tensor? ori_topk_length=None,
    Tensor? cmp_topk_length=None, int? batch_size=None, int? max_seqlen_q=None,
    int? max_seqlen_ori_kv=None, int? max_seqlen_cmp_kv=None, int? ori_topk=None,
    int? cmp_topk=None, int? cmp_ratio=None, int? ori_mask_mode=None, int? cmp_mask_mode=None,
    int? ori_win_left=None, int? ori_win_right=None, str? layout_q=None, str? layout_kv=None,
    bool? has_ori_kv=None, bool? has_cmp_kv=None) -> Tensor
cann_ops_transformer::sparse_flash_mla_grad(Tensor q, Tensor dout, Tensor attn_out,
    Tensor softmax_lse, Tensor? ori_kv=None, Tensor? cmp_kv=None, Tensor? ori_sparse_indices=None,
    Tensor? cmp_sparse_indices=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None,
    Tensor? cu_seqlens_cmp_kv=None, Tensor? seqused_q=None, Tensor? seqused_ori_kv=None,
    Tensor? seqused_cmp_kv=None, Tensor? cmp_residual_kv=None, Tensor? ori_topk_length=None,
    Tensor? cmp_topk_length=None, Tensor? sinks=None, Tensor? metadata=None,
    float softmax_scale=None, int cmp_ratio=None, int ori_mask_mode=0, int cmp_mask_mode=0,
    int ori_win_left=-1, int ori_win_right=-1, str layout_q="BSND",
    str layout_kv="BSND") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)
cann_ops_transformer::sparse_lightning_indexer_kl_loss_grad_metadata(int num_heads_q,
    int num_heads_k, int head_dim, *, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None,
    Tensor? seqused_q=None, Tensor? seqused_k=None, Tensor? cmp_residual_k=None,
    int? batch_size=None, int? max_seqlen_q=None, int? max_seqlen_k=None, int? topk=None,
    str? layout_q=None, str? layout_k=None, int? mask_mode=None, int? cmp_ratio=None) -> Tensor
cann_ops_transformer::sparse_lightning_indexer_kl_loss_grad(Tensor q, Tensor k, Tensor w,
    Tensor sparse_indices, Tensor attn_softmax_l1_norm, *, Tensor? cu_seqlens_q=None,
    Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None,
    Tensor? cmp_residual_k=None, Tensor? metadata=None, str layout_q="TND", str layout_k="TND",
    int mask_mode=3, int cmp_ratio=1) -> (Tensor, Tensor, Tensor, Tensor)
"""

# Without their names, which are the keys.
SCHEMAS: dict[str, str] = {
    schema[: schema.index("(")]: schema[schema.index("(") :]
    for schema in re.sub(r"\n +", " ", _SCHEMAS).splitlines()
}

# The forms for graphs: into given outputs, with a workspace that the caller keeps.
for _name in ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"):
    _arguments = SCHEMAS[f"npu::{_name}"].removesuffix(") -> (Tensor, Tensor)")
    SCHEMAS[f"npu::{_name}.out"] = (
        f"{_arguments}, Tensor? workspace=None, Tensor[] out) -> (Tensor, Tensor)"
    )
    SCHEMAS[f"npu::_{_name}_get_max_workspace"] = f"{_arguments}) -> Tensor"
