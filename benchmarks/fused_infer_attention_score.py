"""Serving with fused_infer_attention_score: decoding over pages, speculative decoding, and prefill.

    python benchmarks/fused_infer_attention_score.py

The peer is torch's scaled_dot_product_attention on contiguous keys, which a paged cache would first
have to be copied to. The limit is one reading of the keys and values, by sums over the cache, or
the products at the speed of torch's matrix products, whichever takes longer; it is timed in turn
with the others.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import ascend_attn_ops
import torch
from harness import PEAK_SIZE, Benchmark, Call, interleaved, peak_product, read
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class Case(NamedTuple):
    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    size: int = 128
    rope: int = 0
    pages: str = "rows"  # "heads", "fractals", or "" for contiguous keys
    block_size: int = 128
    int8: bool = False  # keys and values, with a scale for each channel

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.key_heads}"
        rope = f"+{self.rope}" if self.rope else ""
        form = f"pages of {self.pages}" if self.pages else "contiguous"
        form += " in int8" if self.int8 else ""
        tokens = f"{self.queries} over {self.keys}"
        return f"B={self.batch} N={heads} D={self.size}{rope}, {tokens}, {form}"

    def keys_of(self, size: int) -> Tensor:
        """(B, S, Nk, D), or the pages of a cache."""
        blocks = self.batch * self.keys // self.block_size
        shape = {
            "": (self.batch, self.keys, self.key_heads, size),
            "rows": (blocks, self.block_size, self.key_heads * size),
            "heads": (blocks, self.key_heads, self.block_size, size),
            "fractals": (blocks, self.key_heads, size // 16, self.block_size, 16),
        }[self.pages]
        if self.int8:
            shape = (blocks, self.key_heads, size // 32, self.block_size, 32)
            return torch.randint(-128, 128, shape, dtype=torch.int8)
        return torch.randn(shape).bfloat16()


CASES = [
    *(Case(batch, 1, 4096, 16, 16) for batch in (1, 8)),
    *(Case(8, 1, 4096, 32, 8, pages=pages) for pages in ("", "rows", "heads", "fractals")),
    *(Case(8, 1, 16384, 32, 8, pages="fractals", int8=int8) for int8 in (False, True)),
    Case(8, 4, 4096, 32, 8),  # speculative decoding
    Case(4, 1, 4096, 128, 1, size=512, rope=64),  # absorbed latent attention
    Case(1, 512, 4096, 32, 8),  # a chunk of a prompt
    Case(1, 2048, 2048, 16, 16, pages=""),
]


def share_of_peak(case: Case) -> float:
    """Multiply-adds of both products, causal where queries are keys, as a share of the product that
    measures the peak."""
    kept = case.keys // 2 if case.queries == case.keys else case.keys
    rows = case.batch * case.queries * case.heads
    return rows * kept * (2 * case.size + case.rope) / PEAK_SIZE**3


def calls(case: Case) -> dict[str, Call]:
    torch.manual_seed(0)
    query = torch.randn(case.batch, case.queries, case.heads, case.size).bfloat16()
    key, value = case.keys_of(case.size), case.keys_of(case.size)
    options: dict[str, Any] = {
        "num_heads": case.heads,
        "num_key_value_heads": case.key_heads,
        "layout": "BSND",
        "sparse_mode": 3,
    }
    if case.rope:
        options["query_rope"] = torch.randn(*query.shape[:3], case.rope).bfloat16()
        options["key_rope"] = case.keys_of(case.rope)
    if case.pages:
        blocks = torch.randperm(key.shape[0], dtype=torch.int32)
        options["block_table"] = blocks.view(case.batch, -1)
        options["actual_seq_lengths_key"] = [case.keys] * case.batch
    if case.int8:
        for name in ("key_antiquant_scale", "value_antiquant_scale"):
            options[name] = torch.rand(case.key_heads, case.size).bfloat16() / 64
        options["inner_precise"] = 1
    joined = case.size + case.rope
    shape = (case.batch, case.key_heads, case.keys)
    q = torch.randn(case.batch, case.heads, case.queries, joined).bfloat16()
    k, v = torch.randn(*shape, joined).bfloat16(), torch.randn(*shape, case.size).bfloat16()
    # SDPA aligns its causal mask to the upper left corner.
    causal: dict[str, Any] = {"is_causal": True} if case.queries == case.keys else {}
    if 1 < case.queries < case.keys:
        keep = torch.ones(case.queries, case.keys, dtype=torch.bool)
        causal = {"attn_mask": keep.tril(case.keys - case.queries)}
    gqa = case.heads != case.key_heads
    found: dict[str, Call] = {
        "ours": partial(ascend_attn_ops.fused_infer_attention_score, query, key, value, **options),
        "reading": partial(read, key, value),
        "products": peak_product(),
    }
    # With 128 heads for one key head, SDPA takes half a minute for a call.
    if not case.rope:
        found["torch SDPA"] = partial(
            scaled_dot_product_attention, q, k, v, enable_gqa=gqa, **causal
        )
    return found


def main() -> None:
    run = Benchmark(__file__, __doc__, rounds=7)
    for case in CASES:
        seconds = interleaved(calls(case), run.rounds)
        seconds["products"] *= share_of_peak(case)
        run.show(str(case), seconds)


if __name__ == "__main__":
    main()
