"""The examples of docs/first_steps.md."""

import ascend_attn_ops as ops
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

torch.manual_seed(0)

query = torch.randn(2, 100, 8, 64, dtype=torch.bfloat16, requires_grad=True)
key = torch.randn(2, 160, 2, 64, dtype=torch.bfloat16, requires_grad=True)
value = torch.randn(2, 160, 2, 64, dtype=torch.bfloat16, requires_grad=True)

out, softmax_max, softmax_sum = ops.flash_attention_score(
    query, key, value, num_heads=8, layout="BSND", sparse_mode=3
)
out.sum().backward()
assert key.grad.shape == key.shape

with torch.no_grad():
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        attn_mask=ops.sparse_mode_mask(3, 100, 160),
        enable_gqa=True,
    ).transpose(1, 2)
torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-6)

padding = torch.arange(160) >= 120  # keys that do not count
masked_out, *_ = ops.flash_attention_score(
    query, key, value, num_heads=8, layout="BSND", atten_mask=padding.expand(100, 160)
)
kept, *_ = ops.flash_attention_score(
    query, key, value, num_heads=8, layout="BSND", attn_mask=~padding.expand(100, 160)
)
assert torch.equal(masked_out, kept)

B, S, N = 1, 64, 64  # batch, tokens, heads


def bfloat16(*shape):
    return torch.randn(B, S, *shape, dtype=torch.bfloat16, requires_grad=True)


query, query_rope = bfloat16(N, 512), bfloat16(N, 64)
latent, key_rope = bfloat16(1, 512), bfloat16(1, 64)
query_index, key_index, weights = bfloat16(8, 128), bfloat16(1, 128), bfloat16(8)

keys, _ = ops.lightning_indexer(query_index, key_index, weights, sparse_count=2048)
assert keys.shape == (B, S, 1, 2048)  # per token, its keys; -1 where there are fewer

ropes = {"query_rope": query_rope, "key_rope": key_rope}
out, *statistics = ops.sparse_flash_attention(
    query, latent, latent, keys, scale_value=192**-0.5, **ropes
)
loss = ops.lightning_indexer_kl_loss(
    query, latent, query_index, key_index, weights, keys, *statistics,
    scale_value=192**-0.5, **ropes, reduction="mean",
)  # fmt: skip
(out.sum() + loss).backward()
assert weights.grad.shape == weights.shape  # a gradient of the indexer, from the loss
assert latent.grad.shape == latent.shape  # a gradient of the attention, from its output

query, key = torch.randn(1, 4, 8, 100), torch.randn(1, 4, 1, 100)
with ops.limits(None):
    indices = torch.tensor([0, 1, -1], dtype=torch.int32).expand(1, 4, 1, 3)
    out, *_ = ops.sparse_flash_attention(query, key, key, indices, scale_value=0.1)


@torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")  # default: inductor
def packed_attention(query, key, value, ends):
    out, *_ = ops.flash_attention_score(
        query, key, value, layout="TND", sparse_mode=3,
        actual_seq_lengths_query=ends, actual_seq_lengths_key=ends,
    )  # fmt: skip
    return out


tensors = torch.randn(3, 100, 8, 64, dtype=torch.bfloat16).unbind()
for lengths in ([30, 70], [10, 40, 50], [25, 25, 25, 25]):
    ends = torch.tensor(lengths).cumsum(0)  # on the host, on an NPU as well
    packed_attention(*tensors, ends)

with FakeTensorMode():
    query = torch.empty(1, 4096, 16, 128, dtype=torch.bfloat16, device="cpu")
    out, *_ = ops.flash_attention_score(query, query, query, num_heads=16, layout="BSND")
assert out.shape == (1, 4096, 16, 128)  # and nothing was computed
