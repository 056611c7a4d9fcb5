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

query, key = torch.randn(1, 4, 8, 100), torch.randn(1, 4, 1, 100)
with ops.limits(None):
    indices = torch.tensor([0, 1, -1], dtype=torch.int32).expand(1, 4, 1, 3)
    out, *_ = ops.sparse_flash_attention(query, key, key, indices, scale_value=0.1)

with FakeTensorMode():
    query = torch.empty(1, 4096, 16, 128, dtype=torch.bfloat16, device="cpu")
    out, *_ = ops.flash_attention_score(query, query, query, num_heads=16, layout="BSND")
assert out.shape == (1, 4096, 16, 128)  # and nothing was computed
