"""The overhead of one call: sparse_flash_attention on tensors of a few elements, and what the names
of flash-attn add to flash_attention_score.

    python benchmarks/call_overhead.py

Calls are timed in batches short enough to run undisturbed, and the fastest batch counts. Batches of
calls that are compared alternate.
"""

from __future__ import annotations

from functools import partial

import ascend_attn_ops
import torch
from ascend_attn_ops import flash_attn
from harness import Benchmark, Call, interleaved

CALLS = 100  # of a batch
BATCHES = 400


def fastest(calls: dict[str, Call], batches: int) -> dict[str, float]:
    return interleaved(calls, batches, count=CALLS, of=min)


def names_of_flash_attn() -> dict[str, tuple[Call, Call]]:
    """For each of them, the operator's call that it makes, and its own.

    Without a mask, whose content the CPU would compare with its rule.
    """
    x = torch.randn(1, 1, 1, 8, dtype=torch.bfloat16)
    packed = x[0]
    ends = torch.tensor([0, 1], dtype=torch.int32)
    operator = partial(ascend_attn_ops.flash_attention_score, num_heads=1)
    dense = partial(operator, x, x, x, layout="BSND")
    of_sequences = partial(
        operator, packed, packed, packed, layout="TND",
        actual_seq_lengths_query=[1], actual_seq_lengths_key=[1],
    )  # fmt: skip
    varlen = partial(flash_attn.flash_attn_varlen_func, packed, packed, packed)
    return {
        "flash_attn_func": (dense, partial(flash_attn.flash_attn_func, x, x, x)),
        "flash_attn_varlen_func": (of_sequences, partial(varlen, ends, ends, 1, 1)),
        "flash_attn_varlen_func, lists": (of_sequences, partial(varlen, [0, 1], [0, 1], 1, 1)),
        "flash_attn_with_kvcache": (
            dense, partial(flash_attn.flash_attn_with_kvcache, x, x, x)
        ),
    }  # fmt: skip


def main() -> None:
    run = Benchmark(__file__, __doc__, rounds=BATCHES)
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
    for name, seconds in fastest(calls, run.rounds).items():
        run.show(name, {"torch" if name.startswith("torch") else "ours": seconds})
    for name, (operator_call, call) in names_of_flash_attn().items():
        both: dict[str, Call] = {"ours, operator": operator_call, "ours, by name": call}
        run.show(name, fastest(both, run.rounds))


if __name__ == "__main__":
    main()
