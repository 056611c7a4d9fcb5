"""Attention sinks, separate ropes and many sequences of flash_attention_score.

    python benchmarks/sinks_and_ropes.py

The peer of a sink is the call without one. The peers of ropes are heads that have both parts:
joined before, as a model may hold them, and in every call. The peer of many short sequences is a
pack of few long ones with as many tokens, whose window keeps as many keys of each query.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import ascend_attn_ops
import torch
from harness import Call, interleaved_medians, recorder
from results import parser
from torch import Tensor

SINK, ROPES, PACK = "a sink", "ropes", "many sequences"
COLUMNS = {
    SINK: ("without",),
    ROPES: ("joined heads", "joined in the call"),
    PACK: ("few sequences",),
}
SIZES = "S={} N={} D={} bfloat16 causal"
PACKED_SIZES = "{}x{} or {}x{} tokens N={} D={} bfloat16"

Calls = dict[str, partial[Tensor]]


def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return ascend_attn_ops.flash_attention_score(
        query, key, value, num_heads=query.shape[2], layout="BSND", sparse_mode=3, **options
    )[0]


def attend_joined(q: Tensor, k: Tensor, v: Tensor, q_rope: Tensor, k_rope: Tensor) -> Tensor:
    return attend(torch.cat((q, q_rope), -1), torch.cat((k, k_rope), -1), v)


def attend_with_ropes(q: Tensor, k: Tensor, v: Tensor, q_rope: Tensor, k_rope: Tensor) -> Tensor:
    return attend(q, k, v, query_rope=q_rope, key_rope=k_rope)


def attend_with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return attend(q, k, v, sink=sink)


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, *, ends: list[int], **options: Any
) -> Tensor:
    return ascend_attn_ops.flash_attention_score(
        query, key, value, num_heads=query.shape[1], layout="TND", actual_seq_lengths_query=ends,
        actual_seq_lengths_key=ends, **options,
    )[0]  # fmt: skip


def differentiated(attention: Any, *tensors: Tensor) -> object:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attention(*leaves)
    return torch.autograd.grad(out, leaves, torch.ones_like(out))


def normal(*shape: int) -> Tensor:
    return torch.randn(1, *shape).bfloat16()


def sinks(tokens: int, heads: int, d: int) -> Calls:
    q, k, v = (normal(tokens, heads, d) for _ in range(3))
    return {
        "ours": partial(attend_with_sink, q, k, v, torch.randn(heads)),
        "without": partial(attend, q, k, v),
    }


def ropes(tokens: int, heads: int, d: int, rope: int) -> Calls:
    q, k, v = (normal(tokens, heads, d) for _ in range(3))
    q_rope, k_rope = (normal(tokens, heads, rope) for _ in range(2))
    joined_q, joined_k = (torch.cat(pair, -1) for pair in ((q, q_rope), (k, k_rope)))
    return {
        "ours": partial(attend_with_ropes, q, k, v, q_rope, k_rope),
        "joined heads": partial(attend, joined_q, joined_k, v),
        "joined in the call": partial(attend_joined, q, k, v, q_rope, k_rope),
    }


def packs(short: int, long: int, count: int, heads: int, d: int) -> Calls:
    """`count` long sequences, and short ones of as many tokens."""
    tokens = count * long
    q, k, v = (torch.randn(tokens, heads, d).bfloat16() for _ in range(3))
    window = {"sparse_mode": 4, "pre_tokens": short - 1, "next_tokens": 0}
    ends_of_short = list(range(short, tokens + 1, short))
    ends_of_long = list(range(long, tokens + 1, long))
    return {
        "ours": partial(attend_packed, q, k, v, ends=ends_of_short),
        "few sequences": partial(attend_packed, q, k, v, ends=ends_of_long, **window),
    }


CASES: dict[str, tuple[str, Calls]] = {}
for _sizes in ((2048, 16, 128), (2048, 32, 64), (256, 16, 64)):
    CASES[SIZES.format(*_sizes)] = SINK, sinks(*_sizes)
for _tokens, _heads in ((2048, 16), (256, 16)):
    CASES[SIZES.format(_tokens, _heads, "128+64")] = ROPES, ropes(_tokens, _heads, 128, 64)
CASES[PACKED_SIZES.format(20000, 16, 20, 16000, 4, 64)] = PACK, packs(16, 16000, 20, 4, 64)


def main() -> None:
    arguments = parser(__doc__, rounds=15).parse_args()
    record = recorder("sinks_and_ropes", arguments.json)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; milliseconds, and ratios")
    with ascend_attn_ops.limits(None):
        for sizes, (kind, calls) in CASES.items():
            backward = {
                name: partial(differentiated, partial(call.func, **call.keywords), *call.args)
                for name, call in calls.items()
            }
            steps: dict[str, Mapping[str, Call]] = {"forward": calls, "forward+backward": backward}
            for step, timed in steps.items():
                case = f"{sizes}, {kind}, {step}"
                seconds = interleaved_medians(timed, arguments.rounds)
                for name, time in seconds.items():
                    record.add(case, name, seconds=time)
                ratios = [f"{seconds['ours'] / seconds[x]:.3f} of {x}" for x in COLUMNS[kind]]
                print(f"{case:60} {seconds['ours'] * 1e3:9.2f}  {', '.join(ratios)}", flush=True)


if __name__ == "__main__":
    main()
