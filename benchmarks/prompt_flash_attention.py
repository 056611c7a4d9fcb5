"""prompt_flash_attention against torch's scaled_dot_product_attention.

    python benchmarks/prompt_flash_attention.py

Prefill of one causal prompt, against is_causal; and of batches of right-padded prompts, against the
matrix of kept keys, the only form that takes such a mask. Then int8 against bfloat16, with tensors
quantised beforehand and with their quantisation in the call. FLOPs are counted for the pairs that
the mask keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ascend_attn_ops
import torch
from harness import Call, Row, extra_memory, measure, recorder, report
from results import parser
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
        heads = self.heads[0] if len(set(self.heads)) == 1 else f"{self.heads[0]}/{self.heads[1]}"
        lengths = "+".join(map(str, self.lengths))
        dtype = str(self.dtype).removeprefix("torch.")
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
        scaled_dot_product_attention,
        q,
        k,
        v,
        attn_mask=kept,
        is_causal=prompts.causal and kept is None,
        enable_gqa=prompts.heads[0] != prompts.heads[1],
    )


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
        ascend_attn_ops.flash_attention_score,
        *prompts.inputs(),
        num_heads=prompts.heads[0],
        layout="BNSD",
        sparse_mode=2 if prompts.causal else 0,
    )


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


def rows(prompts: Prompts, rounds: int) -> list[Row]:
    peers = {"torch SDPA": torch_sdpa(prompts)}
    return measure(str(prompts), ours(prompts), peers, prompts.flops(), rounds, dtype=prompts.dtype)


INT8_CASES = [
    Prompts(),
    Prompts(causal=False),
    Prompts(heads=(32, 8)),
    Prompts(RIGHT_PADDED, heads=(4, 4)),
]


def int8_rows(prompts: Prompts, rounds: int) -> list[Row]:
    ways = {"ours, from bfloat16": ours_quantizing(prompts), "ours, bfloat16": ours(prompts)}
    if not prompts.padded:
        ways["ours, flash_attention_score"] = ours_training(prompts)
    case = str(replace(prompts, dtype=torch.int8))
    return measure(case, ours_int8(prompts), ways, prompts.flops(), rounds)


def warm_call(make: Callable[[Prompts], Call], prompts: Prompts) -> Call:
    """Prepare a call in a fresh process, which has loaded libraries and generated code."""
    make(replace(prompts, lengths=(64,) * len(prompts.lengths)))()
    return make(prompts)


def main() -> None:
    arguments = parser(__doc__, rounds=5).parse_args()
    record = recorder("prompt_flash_attention", arguments.json)
    report(record, [row for prompts in CASES for row in rows(prompts, arguments.rounds)])
    print("\nint8 inputs, float16 output; the same prompts in bfloat16")
    report(record, [row for prompts in INT8_CASES for row in int8_rows(prompts, arguments.rounds)])
    print("\nExtra memory at the peak of one call, outputs included (MiB)")
    for prompts in (CASES[0], CASES[4]):
        makes = {"ours": ours, "ours, int8": ours_int8, "torch SDPA": torch_sdpa}
        for name, make in makes.items():
            extra = extra_memory(partial(warm_call, make, prompts))
            print(f"{f'{prompts}, {name}':64} {extra / 2**20:9.1f}")
            record.add(str(prompts), name, bytes=extra)


if __name__ == "__main__":
    main()
