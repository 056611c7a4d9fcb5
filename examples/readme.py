"""The examples of README.md: dense attention, sparse attention that trains, a paged cache."""

import ascend_attn_ops as ops
import torch

query = torch.randn(1, 512, 16, 128, dtype=torch.bfloat16, requires_grad=True)
key, value = torch.randn(2, 1, 512, 4, 128, dtype=torch.bfloat16)
out, *_ = ops.flash_attention_score(query, key, value, num_heads=16, layout="BSND", sparse_mode=3)
out.sum().backward()

latent, query, query_rope, key_rope, q_index, k_index, weights = (
    torch.randn(1, 64, *shape, dtype=torch.bfloat16, requires_grad=True)
    for shape in [(1, 512), (64, 512), (64, 64), (1, 64), (8, 128), (1, 128), (8,)]
)
ropes = {"query_rope": query_rope, "key_rope": key_rope, "scale_value": 192**-0.5}
keys, _ = ops.lightning_indexer(q_index, k_index, weights, sparse_count=2048)
out, *statistics = ops.sparse_flash_attention(query, latent, latent, keys, **ropes)
loss = ops.lightning_indexer_kl_loss(
    query, latent, q_index, k_index, weights, keys, *statistics, **ropes
)
(out.sum() + loss).backward()

key_cache, value_cache = torch.zeros(2, 10, 16, 8, 128, dtype=torch.bfloat16)  # 10 blocks of 16
key, value = torch.randn(2, 3, 8, 128, dtype=torch.bfloat16)
blocks = torch.tensor([7, 2], dtype=torch.int32)
slots = ops.slot_mapping(blocks, torch.tensor([14, 15, 16]), block_size=16)
ops.scatter_pa_kv_cache_(key, key_cache, slots, value, value_cache)
assert torch.equal(key_cache[2, 0], key[2])
