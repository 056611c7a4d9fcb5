"""One step of decoding with DeepSeek Sparse Attention over a paged cache, at growing context.

    python benchmarks/sparse_decode.py

Sparse: the indexer scores all keys, and the attention reads the K best. Int8: the same over a cache
in int8. Dense: the attention reads all keys. torch: scaled_dot_product_attention over contiguous
keys. The limits are one reading of the keys, at the speed of a sum over a large tensor, and the
products, at the speed of a large bf16 matmul; both are timed in turn with the others.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import ascend_attn_ops as ops
import torch
from harness import PEAK_SIZE, Benchmark, Call, interleaved, peak_product
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

HEADS, D, ROPE = 64, 512, 64
INDEX_HEADS, INDEX_D = 64, 128
K, BLOCK = 2048, 128
SCALE = 192**-0.5  # DeepSeek-V3.2, with heads of 128 + 64 before absorption
CONTEXTS = (1024, 4096, 16384, 65536)
READ_ELEMENTS = 1 << 25  # of 2 bytes: more than a cache holds


class Step(NamedTuple):
    """One new token of each of B sequences, and caches with blocks in random order."""

    query: Tensor
    query_rope: Tensor
    query_index: Tensor
    weights: Tensor
    latent: Tensor
    rope: Tensor
    key_index: Tensor
    block_table: Tensor
    lengths: Tensor

    def pages(self) -> dict[str, Any]:
        return {"actual_seq_lengths_key": self.lengths, "block_table": self.block_table}

    def select(self) -> Tensor:
        indices, _ = ops.lightning_indexer(
            self.query_index, self.key_index, self.weights, sparse_count=K,
            layout_key="PA_BSND", **self.pages(),
        )  # fmt: skip
        return indices

    def attend(self, indices: Tensor) -> Tensor:
        out, *_ = ops.sparse_flash_attention(
            self.query, self.latent, self.latent, indices, scale_value=SCALE,
            query_rope=self.query_rope, key_rope=self.rope, layout_kv="PA_BSND", **self.pages(),
        )  # fmt: skip
        return out

    def all_keys(self) -> Tensor:
        keys = torch.arange(int(self.lengths[0]), dtype=torch.int32)
        return keys.expand(len(self.lengths), 1, 1, -1).contiguous()

    def in_int8(self, indices: Tensor) -> dict[str, Call]:
        """Both calls over the same keys in int8, which are quantised before the clock starts."""
        query, scales = ops.quantize_index_keys(self.query_index)
        key, key_scales = ops.quantize_index_keys(self.key_index)
        rows = ops.quantize_latent(self.latent, self.rope)
        joined = torch.cat((self.query, self.query_rope), -1)
        return {
            "ours, indexer int8": partial(
                ops.quant_lightning_indexer, query, key, self.weights.half(), scales, key_scales,
                sparse_count=K, layout_key="PA_BSND", **self.pages(),
            ),
            "ours, attention int8": partial(
                ops.kv_quant_sparse_flash_attention, joined, rows, rows, indices,
                scale_value=SCALE, layout_kv="PA_BSND", **self.pages(),
            ),
        }  # fmt: skip


def make_step(batch: int, keys: int) -> Step:
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape).bfloat16()

    blocks = batch * keys // BLOCK
    return Step(
        query=normal(batch, 1, HEADS, D),
        query_rope=normal(batch, 1, HEADS, ROPE),
        query_index=normal(batch, 1, INDEX_HEADS, INDEX_D),
        weights=normal(batch, 1, INDEX_HEADS),
        latent=normal(blocks, BLOCK, 1, D),
        rope=normal(blocks, BLOCK, 1, ROPE),
        key_index=normal(blocks, BLOCK, 1, INDEX_D),
        block_table=torch.randperm(blocks, dtype=torch.int32).view(batch, -1),
        lengths=torch.full((batch,), keys, dtype=torch.int32),
    )


def torch_attention(step: Step) -> Call:
    """Attends to contiguous keys, which are made before the clock starts. The heads share their
    keys, so they are passed as tokens of one head: anything else takes it much longer."""
    caches = step.latent, step.rope
    rows = (ops.gather_paged_kv(x, step.block_table, step.lengths) for x in caches)
    value, rope = (x.unflatten(0, (len(step.lengths), -1)).transpose(1, 2) for x in rows)
    query, key = torch.cat((step.query, step.query_rope), -1), torch.cat((value, rope), -1)
    return partial(scaled_dot_product_attention, query, key, value, scale=SCALE)


def measure(run: Benchmark, batch: int, keys: int) -> None:
    step = make_step(batch, keys)
    indices, everything = step.select(), step.all_keys()
    read = torch.ones(READ_ELEMENTS, dtype=torch.int16)
    seconds = interleaved(
        {
            "ours, indexer": step.select,
            "ours, attention": partial(step.attend, indices),
            "ours, dense": partial(step.attend, everything),
            **step.in_int8(indices),
            "torch": torch_attention(step),
            "peak": peak_product(),
            "read": lambda: read.view(torch.int64).sum(),
        },
        run.rounds,
    )
    peak = 2 * PEAK_SIZE**3 / seconds.pop("peak")
    bandwidth = READ_ELEMENTS * 2 / seconds.pop("read")
    selected = min(K, keys)
    products = 2 * batch * (INDEX_HEADS * INDEX_D * keys + HEADS * (2 * D + ROPE) * selected)
    bytes_read = 2 * batch * (INDEX_D * keys + (D + ROPE) * selected)
    seconds["ours, sparse"] = seconds["ours, indexer"] + seconds["ours, attention"]
    seconds["limit"] = max(products / peak, bytes_read / bandwidth)
    run.show(f"B={batch} keys={keys}", seconds, batch=batch, keys=keys)


def main() -> None:
    run = Benchmark(__file__, __doc__, rounds=15)
    for batch in (1, 8):
        for keys in CONTEXTS[: None if batch == 1 else 3]:
            measure(run, batch, keys)


if __name__ == "__main__":
    main()
