"""prompt_flash_attention against torch's scaled_dot_product_attention.

    python benchmarks/prompt_flash_attention.py

Prefill of one causal prompt, against is_causal; and of batches of right-padded prompts, against the
matrix of kept keys, the only form that takes such a mask. Then int8 against bfloat16, with tensors
quantised beforehand and with their quantisation in the call. FLOPs are counted for the pairs that
the mask keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ascend_attn_ops
import torch
from harness import Benchmark, Call, heads_of, name_of
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

TOKENS = 2048


@dataclass(frozen=True)
class Prompts:
    """Prompts of these lengths, padded to TOKENS."""

    lengths: tuple[int, ...] = (TOKENS,)
    heads: tuple[int, int] = (16, 16)
    d: int = 128
    causal: bool = True
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        heads, dtype = heads_of(*self.heads), name_of(self.dtype)
        lengths = "+".join(map(str, self.lengths))
        return f"S={lengths} N={heads} D={self.d} {dtype} {'causal' if self.causal else 'full'}"

    @property
    def padded(self) -> bool:
        return any(length < TOKENS for length in self.lengths)

    def kept(self) -> Tensor:
        """Return the kept keys, (B, 1, S, S).

        Padding rows keep the keys of their prompt, because SDPA gives NaN for rows without keys.
        """
        column = torch.arange(TOKENS)
        valid = (column < torch.tensor(self.lengths)[:, None])[:, None, None]
        causal = column <= column[:, None]
        return valid & causal if self.causal else valid.expand(-1, -1, TOKENS, -1)

    def flops(self) -> int:
        pairs = sum(n * (n + 1) // 2 if self.causal else n * n for n in self.lengths)
        return 4 * self.heads[0] * self.d * pairs

    def inputs(self) -> list[Tensor]:
        torch.manual_seed(0)
        n, nk = self.heads
        shapes = [(len(self.lengths), heads, TOKENS, self.d) for heads in (n, nk, nk)]
        return [torch.randn(shape).to(self.dtype) for shape in shapes]


def options(prompts: Prompts) -> dict[str, Any]:
    return {
        "num_heads": prompts.heads[0],
        "num_key_value_heads": prompts.heads[1],
        "layout": "BNSD",
        "actual_seq_lengths_query": prompts.lengths if prompts.padded else None,
        "actual_seq_lengths_key": prompts.lengths if prompts.padded else None,
        "sparse_mode": 2 if prompts.causal else 0,
    }


def ours(prompts: Prompts) -> Call:
    return partial(ascend_attn_ops.prompt_flash_attention, *prompts.inputs(), **options(prompts))


def torch_sdpa(prompts: Prompts) -> Call:
    q, k, v = prompts.inputs()
    kept = prompts.kept() if prompts.padded else None
    return partial(
        scaled_dot_product_attention, q, k, v, attn_mask=kept,
        is_causal=prompts.causal and kept is None,
        enable_gqa=prompts.heads[0] != prompts.heads[1],
    )  # fmt: skip


def ours_int8(prompts: Prompts) -> Call:
    quantized = ascend_attn_ops.quantize_attention_inputs(*prompts.inputs())
    return partial(
        ascend_attn_ops.prompt_flash_attention, **quantized._asdict(), **options(prompts)
    )


def ours_quantizing(prompts: Prompts) -> Call:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        quantized = ascend_attn_ops.quantize_attention_inputs(query, key, value)
        return ascend_attn_ops.prompt_flash_attention(**quantized._asdict(), **options(prompts))

    return partial(call, *prompts.inputs())


def ours_training(prompts: Prompts) -> Call:
    return partial(
        ascend_attn_ops.flash_attention_score, *prompts.inputs(), num_heads=prompts.heads[0],
        layout="BNSD", sparse_mode=2 if prompts.causal else 0,
    )  # fmt: skip


RIGHT_PADDED = tuple(TOKENS * quarter // 4 for quarter in (1, 2, 3, 4))

CASES = [
    Prompts(),
    Prompts(causal=False),
    Prompts(heads=(32, 8)),
    Prompts(dtype=torch.float16),
    Prompts(RIGHT_PADDED, heads=(4, 4)),
    Prompts(RIGHT_PADDED, heads=(4, 4), causal=False),
    # The same sizes with a quarter of the work and with all of it: time follows the work.
    Prompts((TOKENS // 4,) * 4, heads=(4, 4), causal=False),
    Prompts((TOKENS,) * 4, heads=(4, 4), causal=False),
]


INT8_CASES = [*CASES[:3], CASES[4]]


def main() -> None:
    run = Benchmark(__file__, __doc__, rounds=5)
    for x in CASES:
        run.measure(str(x), ours(x), {"torch SDPA": torch_sdpa(x)}, x.flops(), x.dtype)
    for x in INT8_CASES:
        ways = {"ours, from bfloat16": ours_quantizing(x), "ours, bfloat16": ours(x)}
        if not x.padded:
            ways["ours, flash_attention_score"] = ours_training(x)
        run.measure(str(replace(x, dtype=torch.int8)), ours_int8(x), ways, x.flops())


if __name__ == "__main__":
    main()
