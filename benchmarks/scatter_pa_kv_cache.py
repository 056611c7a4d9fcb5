"""scatter_pa_kv_cache_ against index_put_ and, as the physical limit, copy_ of the same bytes.

`flat` is index_put_ on a view of the cache as rows, indexed by the slots themselves; `by block` is
index_put_ on the cache itself, at slots // block_size and slots % block_size. PA_NZ has no rows.

Key and value of 8 heads of 128 in bf16, blocks of 128. `paged`: sequences in blocks of their own,
in random order, as serving leaves them. `random`: no two neighbouring rows have neighbouring slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import ascend_attn_ops as ops
import torch
from harness import Benchmark, Call
from torch import Tensor

HEADS, SIZE, BLOCK = 8, 128, 128
DTYPE = torch.bfloat16
TOKENS = (0, 16, 512, 32768)


@dataclass(frozen=True)
class Case:
    tokens: int
    slots: Tensor  # (T,) int64, the dtype that index_put_ takes

    @staticmethod
    def make(tokens: int, order: str) -> Case:
        capacity = max(2 * tokens, 64 * BLOCK)
        if order == "random":
            return Case(tokens, torch.randperm(capacity)[:tokens])
        blocks = torch.randperm(capacity // BLOCK)
        # Short calls are decode steps: each row goes to the block of another sequence.
        rows = BLOCK if tokens >= BLOCK else 1
        slots = blocks[:, None] * BLOCK + torch.arange(rows)
        return Case(tokens, slots.flatten()[:tokens])

    @property
    def blocks(self) -> int:
        return max(2 * self.tokens, 64 * BLOCK) // BLOCK

    def calls(self, layout: str) -> dict[str, Call]:
        key, value = torch.randn(2, self.tokens, HEADS, SIZE).to(DTYPE)
        shape: tuple[int, ...] = (self.blocks, BLOCK, HEADS, SIZE)
        if layout == "PA_NZ":
            shape = ops.nz_cache_shape(self.blocks, BLOCK, HEADS, SIZE, DTYPE)
        key_cache, value_cache = torch.zeros(2, *shape, dtype=DTYPE)
        pairs = ((key, key_cache), (value, value_cache))
        rows = [(x, cache.view(-1, HEADS, SIZE)) for x, cache in pairs]

        def ours() -> None:
            ops.scatter_pa_kv_cache_(
                key, key_cache, self.slots, value, value_cache, cache_mode=layout
            )

        def flat() -> None:
            for source, cache in rows:
                cache.index_put_((self.slots,), source)

        def by_block() -> None:
            index = (self.slots // BLOCK, self.slots % BLOCK)
            fractals = self.tokens, HEADS * SIZE // shape[-1], shape[-1]
            for source, cache in pairs:
                if layout == "PA_NZ":
                    # A view with a row's fractals last: (num_blocks, block_size, N * D / L, L).
                    cache, source = cache.transpose(1, 2), source.view(*fractals)
                cache.index_put_(index, source)

        def copy() -> None:
            for source, cache in rows:
                cache[: self.tokens].copy_(source)

        calls: dict[str, Call] = {"ours": ours, "by block": by_block, "copy_": copy}
        return calls if layout == "PA_NZ" else {**calls, "flat": flat}


def main() -> None:
    run = Benchmark(__file__, __doc__, rounds=15)
    torch.manual_seed(0)
    for layout in ("Norm", "PA_NZ"):
        for order in ("paged", "random"):
            for tokens in TOKENS:
                case = Case.make(tokens, order)
                count = max(1, 8192 // max(16, tokens))
                run.time(f"{layout}, {order} slots, {tokens}", case.calls(layout), count=count)


if __name__ == "__main__":
    main()
