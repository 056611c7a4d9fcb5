"""Calls of scatter_pa_kv_cache_ that devices take, and modes that Ascend 950 ignores."""

from __future__ import annotations

import re
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops.check.boundaries.scatter import (
    BY_HEADS,
    FIVE_AXES,
    GAPS,
    NEW,
    NZ_GAPS,
    OLD,
    Arguments,
    Device,
    nz,
    rows,
    runs,
)

OPERATOR = torch.ops.ascend.scatter_pa_kv_cache_


ACCEPTED: list[tuple[list[Device], Arguments]] = [
    (OLD, runs("Rope", dtype=torch.int8, d=32)),
    (OLD, nz(65536)),
    (NEW, rows(t=0)),
    (NEW, FIVE_AXES),
    *(([("A2", "9.1"), ("A3", "9.1"), ("950", "9.1")], x) for x in (GAPS, BY_HEADS, NZ_GAPS)),
    ([("950", "9.0"), ("950", "9.1")], rows(t=33)),
    ([("950", "9.1")], FIVE_AXES),
    ([("950", "9.1")], nz(65536)),
]


@pytest.mark.parametrize(("devices", "arguments"), ACCEPTED, ids=str)
def test_accepted(devices: list[Device], arguments: Arguments) -> None:
    for product, cann in devices:
        with ops.limits(product, cann=cann):
            OPERATOR(**arguments)


@pytest.mark.parametrize("cann", ["8.5", "9.0"])
def test_950_ignores_the_modes(cann: Any) -> None:
    """So a cache in fractal layout has a wrong shape, and strides would be ignored."""
    with ops.limits("950", cann=cann):
        OPERATOR(**rows(cache_mode="PA_NZ", scatter_mode="Omni"))
        with pytest.raises(ValueError, match=re.escape("(num_blocks, block_size, N, D)")):
            OPERATOR(**nz())
        with pytest.raises(ValueError, match=r"strides: expected \[1, 1\]"):
            OPERATOR(**rows(scatter_mode="Nct", strides=[7, 7]))


def test_950_obeys_the_modes_from_cann_9_1_on() -> None:
    with ops.limits("950", cann="9.1"):
        OPERATOR(**nz())
        with pytest.raises(ValueError, match=re.escape("(num_blocks, N * D / L, block_size, L)")):
            OPERATOR(**rows(d=32, cache_mode="PA_NZ"))
