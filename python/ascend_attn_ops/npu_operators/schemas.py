"""The schemas of torch_npu's operators, as this release has them.

Where torch_npu is installed its own are in force; these serve where it is not.
"""

from __future__ import annotations

import re

RELEASE = "2.13.0"

# torch_npu loads the library of torch.ops.atb, which the last one is of, where NNAL is installed.
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
npu::npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *,
    Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None,
    Tensor? block_table=None, str layout_query="BSND", str layout_key="BSND", int sparse_count=2048,
    int sparse_mode=3, int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807,
    bool return_value=False) -> (Tensor, Tensor)
npu::npu_lightning_indexer_grad(Tensor query, Tensor key, Tensor dy, Tensor sparse_indices,
    Tensor weights, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None,
    str? layout="BSND", int? sparse_mode=3, int? pre_tokens=9223372036854775807,
    int? next_tokens=9223372036854775807) -> (Tensor, Tensor, Tensor)
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
"""

# Without their names, which are the keys.
SCHEMAS: dict[str, str] = {
    schema[: schema.index("(")]: schema[schema.index("(") :]
    for schema in re.sub(r"\n +", " ", _SCHEMAS).splitlines()
}
