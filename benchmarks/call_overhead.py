"""The overhead of one call: sparse_flash_attention on tensors of a few elements.

    python benchmarks/call_overhead.py

Calls are timed in batches short enough to run undisturbed, and the fastest batch counts.
"""

from __future__ import annotations

import time
from functools import partial

import ascend_attn_ops
import torch
from harness import Call

CALLS = 100
BATCHES = 400


def microseconds(call: Call) -> float:
    """Return the microseconds per call in the fastest batch."""
    fastest = float("inf")
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest / CALLS * 1e6


def main() -> None:
    torch.set_num_threads(1)
    x = torch.randn(1, 1, 1, 4)
    index = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    operator = torch.ops.ascend.sparse_flash_attention.default
    leaf = x.clone().requires_grad_()
    attention = torch.nn.functional.scaled_dot_product_attention
    calls: dict[str, Call] = {
        "operator": partial(operator, x, x, x, index, scale_value=1.0),
        "operator, gradient recorded": partial(operator, leaf, x, x, index, scale_value=1.0),
        "operator, meta tensors": partial(
            operator, *(y.to("meta") for y in (x, x, x, index)), scale_value=1.0
        ),
        "public function": partial(
            ascend_attn_ops.sparse_flash_attention, x, x, x, index, scale_value=1.0
        ),
        "torch, scaled_dot_product_attention": partial(attention, x, x, x),
        "torch, empty": partial(torch.empty, 3),
    }
    with ascend_attn_ops.limits(None):
        for name, call in calls.items():
            print(f"{name:40} {microseconds(call):6.1f} us")


if __name__ == "__main__":
    main()
