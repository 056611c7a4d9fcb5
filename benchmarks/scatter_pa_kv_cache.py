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
from harness import Call, interleaved_medians, recorder
from results import parser
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

    def sources(self) -> tuple[Tensor, Tensor]:
        key, value = torch.randn(2, self.tokens, HEADS, SIZE).to(DTYPE)
        return key, value

    def norm(self) -> dict[str, Call]:
        key, value = self.sources()
        key_cache, value_cache = torch.zeros(2, self.blocks, BLOCK, HEADS, SIZE, dtype=DTYPE)
        rows = [cache.flatten(0, 1) for cache in (key_cache, value_cache)]
        targets = [cache[: self.tokens] for cache in rows]

        def ours() -> None:
            ops.scatter_pa_kv_cache_(key, key_cache, self.slots, value, value_cache)

        def index_put() -> None:
            rows[0].index_put_((self.slots,), key)
            rows[1].index_put_((self.slots,), value)

        def copy() -> None:
            targets[0].copy_(key)
            targets[1].copy_(value)

        def index_put_by_block() -> None:
            index = (self.slots // BLOCK, self.slots % BLOCK)
            key_cache.index_put_(index, key)
            value_cache.index_put_(index, value)

        return {"ours": ours, "flat": index_put, "by block": index_put_by_block, "copy_": copy}

    def nz(self) -> dict[str, Call]:
        key, value = self.sources()
        shape = ops.nz_cache_shape(self.blocks, BLOCK, HEADS, SIZE, DTYPE)
        key_cache, value_cache = torch.zeros(2, *shape, dtype=DTYPE)
        pairs = ((key, key_cache), (value, value_cache))
        targets = [cache.view(-1, HEADS, SIZE)[: self.tokens] for cache in (key_cache, value_cache)]

        def ours() -> None:
            ops.scatter_pa_kv_cache_(
                key, key_cache, self.slots, value, value_cache, cache_mode="PA_NZ"
            )

        def index_put() -> None:
            block, position = self.slots // BLOCK, self.slots % BLOCK
            for source, cache in pairs:
                # A view with the fractals of a row last: (num_blocks, block_size, N * D / L, L).
                cache.transpose(1, 2)[block, position] = source.view(
                    self.tokens, HEADS * SIZE // shape[-1], shape[-1]
                )

        def copy() -> None:
            targets[0].copy_(key)
            targets[1].copy_(value)

        return {"ours": ours, "by block": index_put, "copy_": copy}


def repeated(call: Call, times: int) -> Call:
    def repeat() -> None:
        for _ in range(times):
            call()

    return repeat


def main() -> None:
    arguments = parser(__doc__, rounds=15).parse_args()
    record = recorder("scatter_pa_kv_cache", arguments.json)
    torch.manual_seed(0)
    print(
        f"{'microseconds':<14}{'T':>6}{'ours':>10}{'flat':>10}{'by block':>10}{'copy_':>10}"
        f"   ours is faster than"
    )
    for layout in ("Norm", "PA_NZ"):
        for order in ("paged", "random"):
            for tokens in TOKENS:
                case = Case.make(tokens, order)
                calls = case.norm() if layout == "Norm" else case.nz()
                times = max(1, 8192 // max(16, tokens))
                medians = interleaved_medians(
                    {name: repeated(call, times) for name, call in calls.items()}, arguments.rounds
                )
                for name, seconds in medians.items():
                    record.add(f"{layout}, {order} slots, {tokens}", name, seconds=seconds / times)
                each = {name: 1e6 * seconds / times for name, seconds in medians.items()}
                columns = "".join(
                    f"{each[name]:>10.1f}" if name in each else f"{'':>10}"
                    for name in ("ours", "flat", "by block", "copy_")
                )
                ratios = ", ".join(
                    f"{name} {seconds / each['ours']:.1f}x"
                    for name, seconds in each.items()
                    if name != "ours"
                )
                print(f"{layout:<6}{order:<8}{tokens:>6}{columns}   {ratios}", flush=True)


if __name__ == "__main__":
    main()
