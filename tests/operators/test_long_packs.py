"""Packs of more sequences than a launch on the NPU takes, on the CPU, which divides nothing."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from support.tolerance import assert_same_bits
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

N, D = 2, 16


def attend(
    tensors: list[Tensor], d_out: Tensor, lengths: list[int], **options: Any
) -> tuple[Tensor, ...]:
    """The results of a pack, and its gradients."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    ends = list(accumulate(lengths))
    outputs = ops.flash_attention_score(
        *leaves, num_heads=N, layout="TND", sparse_mode=3, actual_seq_lengths_query=ends,
        actual_seq_lengths_key=ends, **options,
    )  # fmt: skip
    gradients = torch.autograd.grad(outputs[0], leaves, d_out)
    return tuple(x.detach() for x in outputs) + gradients


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [2049, 20000, 20001])
def test_a_pack_equals_its_parts(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 5, (count,), generator=generator).tolist()
    tokens = sum(lengths)
    query, key, value, d_out = torch.randn(4, tokens, N, D, generator=generator).to(dtype)
    whole = attend([query, key, value], d_out, lengths)
    parts = []
    begin = 0
    for first in range(0, count, 2048):
        of_part = lengths[first : first + 2048]
        rows = slice(begin, begin + sum(of_part))
        parts.append(attend([x[rows] for x in (query, key, value)], d_out[rows], of_part))
        begin = rows.stop
    assert_same_bits(whole, tuple(torch.cat(x) for x in zip(*parts, strict=True)))


def test_the_scale_of_many_sequences() -> None:
    """Every query weighs a key of score 4 and one of score 0."""
    count = 20001
    query = torch.ones(count, 1, D)
    key = torch.zeros(count, 2, 1, D)
    key[:, 0] = 1
    key = key.flatten(0, 1)
    out, *_ = ops.flash_attention_score(
        query, key, key, num_heads=1, layout="TND", scale_value=0.25,
        actual_seq_lengths_query=list(range(1, count + 1)),
        actual_seq_lengths_key=list(range(2, 2 * count + 1, 2)),
    )  # fmt: skip
    torch.testing.assert_close(out, torch.tensor(4.0).sigmoid().expand_as(out))
