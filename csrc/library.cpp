// Every operator's schema. Kernels: ops/ (what all backends share), cpu/, npu/, autograd/.
#include <torch/library.h>

TORCH_LIBRARY(ascend, m) {
  m.def(
      "lightning_indexer(Tensor query, Tensor key, Tensor weights, *, "
      "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
      "str layout=\"BSND\", SymInt sparse_count=2048, int sparse_mode=3, "
      "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, "
      "bool return_values=False) -> (Tensor sparse_indices, Tensor sparse_values)");
  m.def(
      "lightning_indexer_grad(Tensor query, Tensor key, Tensor d_values, Tensor sparse_indices, "
      "Tensor weights, *, Tensor? actual_seq_lengths_query=None, "
      "Tensor? actual_seq_lengths_key=None, str layout=\"BSND\", int sparse_mode=3, "
      "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, "
      "bool deterministic=False) -> (Tensor d_query, Tensor d_key, Tensor d_weights)");
  m.def(
      "sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, *, "
      "float scale_value, Tensor? actual_seq_lengths_query=None, "
      "Tensor? actual_seq_lengths_key=None, Tensor? query_rope=None, Tensor? key_rope=None, "
      "int sparse_block_size=1, str layout=\"BSND\", int sparse_mode=3, "
      "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, "
      "bool deterministic=False) -> (Tensor out, Tensor softmax_max, Tensor softmax_sum)");
  m.def(
      "sparse_flash_attention_grad(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, "
      "Tensor d_out, Tensor out, Tensor softmax_max, Tensor softmax_sum, *, float scale_value, "
      "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
      "Tensor? query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, "
      "str layout=\"BSND\", int sparse_mode=3, int pre_tokens=2147483647, "
      "int next_tokens=2147483647, bool deterministic=False) -> (Tensor d_query, Tensor d_key, "
      "Tensor d_value, Tensor d_query_rope, Tensor d_key_rope)");
  m.def(
      "sparse_lightning_indexer_grad_kl_loss(Tensor query, Tensor key, Tensor query_index, "
      "Tensor key_index, Tensor weights, Tensor sparse_indices, Tensor softmax_max, "
      "Tensor softmax_sum, *, float scale_value, Tensor? query_rope=None, Tensor? key_rope=None, "
      "SymInt[]? actual_seq_lengths_query=None, SymInt[]? actual_seq_lengths_key=None, "
      "str layout=\"BSND\", int sparse_mode=3, int pre_tokens=9223372036854775807, "
      "int next_tokens=9223372036854775807, bool deterministic=False) -> (Tensor d_query_index, "
      "Tensor d_key_index, Tensor d_weights, Tensor loss)");
  m.def(
      "flash_attention_score(Tensor query, Tensor key, Tensor value, *, SymInt num_heads, str "
      "layout, Tensor? pse_shift=None, Tensor? drop_mask=None, Tensor? atten_mask=None, "
      "SymInt[]? prefix=None, SymInt[]? actual_seq_lengths_query=None, SymInt[]? "
      "actual_seq_lengths_key=None, SymInt[]? q_start_idx=None, SymInt[]? kv_start_idx=None, "
      "float scale_value=1.0, float keep_prob=1.0, int pre_tokens=2147483647, int "
      "next_tokens=2147483647, int inner_precise=0, int sparse_mode=0, int pse_type=1) -> "
      "(Tensor out, Tensor softmax_max, Tensor softmax_sum)");
  m.def(
      "flash_attention_score_grad(Tensor query, Tensor key, Tensor value, Tensor dy, Tensor "
      "softmax_max, Tensor softmax_sum, Tensor attention_in, *, SymInt num_heads, str layout, "
      "Tensor? pse_shift=None, Tensor? drop_mask=None, Tensor? atten_mask=None, SymInt[]? "
      "prefix=None, SymInt[]? actual_seq_lengths_query=None, SymInt[]? "
      "actual_seq_lengths_key=None, SymInt[]? q_start_idx=None, SymInt[]? kv_start_idx=None, "
      "float scale_value=1.0, float keep_prob=1.0, int pre_tokens=2147483647, int "
      "next_tokens=2147483647, int inner_precise=0, int sparse_mode=0, int pse_type=1) -> "
      "(Tensor dq, Tensor dk, Tensor dv)");
  // The gradient of pse_shift, for autograd on the CPU: aclnn has no such function.
  m.def(
      "_flash_attention_score_pse_grad(Tensor query, Tensor key, Tensor value, Tensor dy, "
      "Tensor softmax_max, Tensor softmax_sum, Tensor attention_in, *, SymInt num_heads, str "
      "layout, Tensor? pse_shift=None, Tensor? drop_mask=None, Tensor? atten_mask=None, "
      "SymInt[]? prefix=None, SymInt[]? actual_seq_lengths_query=None, SymInt[]? "
      "actual_seq_lengths_key=None, SymInt[]? q_start_idx=None, SymInt[]? kv_start_idx=None, "
      "float scale_value=1.0, float keep_prob=1.0, int pre_tokens=2147483647, int "
      "next_tokens=2147483647, int inner_precise=0, int sparse_mode=0, int pse_type=1) -> "
      "Tensor dpse");
  m.def(
      "prompt_flash_attention(Tensor query, Tensor key, Tensor value, *, SymInt num_heads, Tensor? "
      "atten_mask=None, SymInt[]? actual_seq_lengths_query=None, SymInt[]? "
      "actual_seq_lengths_key=None, Tensor? deq_scale1=None, Tensor? quant_scale1=None, Tensor? "
      "deq_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, float "
      "scale_value=1.0, int pre_tokens=2147483647, int next_tokens=0, str layout=\"BSH\", SymInt "
      "num_key_value_heads=0, int sparse_mode=0) -> Tensor");
  m.def(
      "scatter_pa_kv_cache_(Tensor key, Tensor(a!) key_cache, Tensor slot_mapping, "
      "Tensor? value=None, Tensor(b!)? value_cache=None, *, Tensor? compress_lens=None, "
      "Tensor? compress_seq_offset=None, Tensor? seq_lens=None, str cache_mode=\"Norm\", "
      "str scatter_mode=\"None\", int[2] strides=[1, 1], int[2] offsets=[0, 0]) -> ()");
}
