"""Attention sinks and separate ropes of flash_attention_score.

    python benchmarks/sinks_and_ropes.py

The peer of a sink is the call without one. The peers of ropes are heads that have both parts:
joined before, as a model may hold them, and in every call.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import ascend_attn_ops
import torch
from harness import Benchmark, Call
from torch import Tensor

SIZES = "S={} N={} D={} bfloat16 causal"
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


def main() -> None:
    run = Benchmark(__file__, __doc__, rounds=15)
    cases: dict[str, Calls] = {}
    for sizes in ((2048, 16, 128), (2048, 32, 64), (256, 16, 64)):
        cases[f"{SIZES.format(*sizes)}, a sink"] = sinks(*sizes)
    for tokens in (2048, 256):
        cases[f"{SIZES.format(tokens, 16, '128+64')}, ropes"] = ropes(tokens, 16, 128, 64)
    for case, calls in cases.items():
        backward: dict[str, Call] = {
            name: partial(differentiated, partial(call.func, **call.keywords), *call.args)
            for name, call in calls.items()
        }
        run.time(f"{case}, forward", calls)
        run.time(f"{case}, forward+backward", backward)


if __name__ == "__main__":
    main()
