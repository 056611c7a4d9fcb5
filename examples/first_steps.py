"""The examples of docs/first_steps.md."""

import ascend_attn_ops as ops
import torch

torch.manual_seed(0)
query = torch.randn(2, 8, 100, 64, dtype=torch.bfloat16, requires_grad=True)  # (B, N, Sq, D)
key, value = torch.randn(2, 2, 2, 160, 64, dtype=torch.bfloat16)  # (B, Nkv, Skv, D) each
call = {"num_heads": 8, "layout": "BNSD"}

out, softmax_max, softmax_sum = ops.flash_attention_score(query, key, value, sparse_mode=3, **call)
out.sum().backward()
expected = torch.nn.functional.scaled_dot_product_attention(
    query, key, value, attn_mask=ops.sparse_mode_mask(3, 100, 160), enable_gqa=True
)
torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-6)

keep = (torch.arange(160) < 120).expand(100, 160)  # (Sq, Skv)
kept, *_ = ops.flash_attention_score(query, key, value, attn_mask=keep, **call)
masked, *_ = ops.flash_attention_score(query, key, value, atten_mask=~keep, **call)
assert torch.equal(masked, kept)

B, S, N, K = 1, 64, 4, 16  # batch, tokens, heads, selected keys


def randn(*shape):
    return torch.randn(B, S, *shape, requires_grad=True)


query, query_rope = randn(N, 64), randn(N, 16)  # (B, S, N, D), (B, S, N, Dr)
latent, key_rope = randn(1, 64), randn(1, 16)
query_index, key_index, weights = randn(8, 32), randn(1, 32), randn(8)  # the indexer, 8 heads
attention = {"query_rope": query_rope, "key_rope": key_rope, "scale_value": 48**-0.5}

with ops.limits(None):  # no NPU kernel accepts such small sizes
    indices, _ = ops.lightning_indexer(query_index, key_index, weights, sparse_count=K)
    out, *statistics = ops.sparse_flash_attention(query, latent, latent, indices, **attention)
    loss = ops.lightning_indexer_kl_loss(
        query, latent, query_index, key_index, weights, indices, *statistics,
        **attention, reduction="mean",
    )  # fmt: skip
    (out.sum() + loss).backward()
print("the last token reads the keys", sorted(indices[0, -1, 0].tolist()))
print(f"loss {loss:.1f} nats per token; norm of its gradient for weights {weights.grad.norm():.1f}")

try:
    ops.sparse_flash_attention(query, latent, latent, indices, **attention)
except TypeError as error:
    print(error)


@torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")  # default: inductor
def packed_attention(query, key, value, ends):
    lengths = {"actual_seq_lengths_query": ends, "actual_seq_lengths_key": ends}
    return ops.flash_attention_score(query, key, value, layout="TND", sparse_mode=3, **lengths)[0]


tensors = torch.randn(3, 100, 8, 64, dtype=torch.bfloat16).unbind()  # (T, N, D)
for lengths in ([30, 70], [10, 40, 50], [25, 25, 25, 25]):
    packed_attention(*tensors, torch.tensor(lengths).cumsum(0))
