"""One token decoded with dense attention over a cache without pages, at growing context.

    python benchmarks/dense_decode.py

The peer is torch's scaled_dot_product_attention on the same memory. The limit is one reading of the
keys and values, by sums over the two tensors; it is timed in turn with the others.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import ascend_attn_ops
import torch
from harness import interleaved_medians, read, recorder
from results import parser
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

D = 128
COLUMNS = ("ours", "torch SDPA", "limit")


class Case(NamedTuple):
    batch: int
    heads: int
    key_heads: int
    keys: int

    def __str__(self) -> str:
        heads = str(self.heads)
        if self.key_heads != self.heads:
            heads += f"/{self.key_heads}"
        return f"B={self.batch} N={heads} D={D}, keys={self.keys}"

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """(B, S, N, D), as caches have it."""
        torch.manual_seed(0)
        shapes = ((1, self.heads), (self.keys, self.key_heads), (self.keys, self.key_heads))
        query, key, value = (torch.randn(self.batch, *shape, D).bfloat16() for shape in shapes)
        return query, key, value


CASES = [
    *(Case(1, 16, 16, keys) for keys in (1024, 4096, 16384, 65536)),
    Case(8, 16, 16, 4096),
    Case(1, 32, 8, 16384),
]


def measure(case: Case, rounds: int) -> dict[str, float]:
    query, key, value = case.inputs()
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    gqa = case.heads != case.key_heads
    return interleaved_medians(
        {
            "ours": lambda: ascend_attn_ops.flash_attention_score(
                query, key, value, num_heads=case.heads, layout="BSND"
            ),
            "torch SDPA": partial(scaled_dot_product_attention, q, k, v, enable_gqa=gqa),
            "limit": partial(read, key, value),
        },
        rounds,
    )


def main() -> None:
    arguments = parser(__doc__, rounds=11).parse_args()
    record = recorder("dense_decode", arguments.json)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, bfloat16; milliseconds\n"
        f"{'':32}" + "".join(f"{name:>12}" for name in COLUMNS)
    )
    with ascend_attn_ops.limits(None):
        for case in CASES:
            seconds = measure(case, arguments.rounds)
            for name, time in seconds.items():
                record.add(str(case), name, seconds=time)
            print(f"{case!s:32}" + "".join(f"{seconds[x] * 1e3:12.2f}" for x in COLUMNS))


if __name__ == "__main__":
    main()
