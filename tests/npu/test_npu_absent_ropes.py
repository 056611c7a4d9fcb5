"""Sparse attention without ropes: CANN's functions require ropes, and the launch passes zeros."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cann_simulator
import pytest
import torch
from arrivals import arriving
from ascend_attn_ops.check.samples.sparse import SparseCase
from support.samples import OPERATORS, Sample
from support.simulated_npu import captured, once, run_in_new_process
from support.tolerance import assert_same_bits

pytestmark = pytest.mark.usefixtures("no_limits")

FORWARD, LOSS = "sparse_flash_attention", "sparse_lightning_indexer_grad_kl_loss"
BSND = SparseCase(s=(9, 30), k=9, absorbed=True)
TND = SparseCase(layout="TND", lengths=((5, 0, 12), (21, 3, 17)), tail=(1, 4), absorbed=True)
PAGED = SparseCase(s=(9, 60), lengths=((9, 7), (60, 33)), k=4, page=16, absorbed=True)
ROPES = ("queryRopeOptional", "keyRopeOptional", "queryRope", "keyRope")
HEADS = 4


def addresses(log: list[dict[str, Any]]) -> list[int]:
    """Where the ropes of the recorded calls are."""
    return [
        entry["arguments"][name]["address"]
        for entry in log
        if entry.get("phase") == 1
        for name in ROPES
        if name in entry["arguments"]
    ]


def launched(sample: Sample) -> list[int]:
    with cann_simulator.computing(False), cann_simulator.recorded_calls() as log:
        sample.call(torch.ops.ascend)
        torch.npu.synchronize()
    return addresses(log)


def no_rope(case: SparseCase, operator: str = FORWARD) -> Sample:
    return OPERATORS[operator].make(replace(case, heads=HEADS), torch.bfloat16)


@pytest.mark.parametrize(
    ("operator", "case"),
    [(FORWARD, BSND), (FORWARD, TND), (FORWARD, PAGED), (LOSS, BSND), (LOSS, TND)],
    ids=lambda x: x if isinstance(x, str) else x.id,
)
def test_zeros_arrive(operator: str, case: SparseCase) -> None:
    sample = no_rope(case, operator)
    for name, beside in (("query_rope", "query"), ("key_rope", "key")):
        rope = arriving(sample, operator, name)
        if not case.page:  # the simulation hands keys over without their pages
            assert rope.shape == (*sample.inputs[beside].shape[:-1], 64)
        assert rope.is_contiguous()
        assert torch.equal(rope, torch.zeros_like(rope))


def test_calls_share_the_zeros() -> None:
    """Also those of another size, operator and layout, as long as there are enough."""
    first = launched(no_rope(BSND).to("npu"))
    assert len(set(first)) == 1
    smaller = replace(BSND, s=(3, 8), k=4)
    for sample in (no_rope(smaller), no_rope(smaller, LOSS)):
        assert set(launched(sample.to("npu"))) == set(first)


def test_more_zeros_leave_the_old_ones() -> None:
    """A graph or another stream may still read them."""
    small, large = (no_rope(replace(BSND, s=(9, n))).to("npu") for n in (30, 50_000))
    old = launched(small)
    before = torch.npu.memory_allocated()
    new = launched(large)
    assert set(new).isdisjoint(old)
    assert torch.npu.memory_allocated() > before
    again = launched(small)
    assert again == new


@captured
@pytest.mark.parametrize("warm", [True, False])
def test_a_capture(warm: bool) -> None:
    """A graph keeps the zeros that exist. If there are too few, it gets zeros of its own."""
    keys = 60_000 if warm else 160_000
    case = replace(BSND, b=1, s=(2, keys), k=5)
    sample = no_rope(case).to("npu")
    shared = set(launched(sample)) if warm else set()
    graph = torch.npu.NPUGraph()
    with cann_simulator.recorded_calls() as log, torch.npu.graph(graph):
        outputs = sample.call(torch.ops.ascend)
    captured = set(addresses(log))
    assert (captured == shared) == warm
    for scale in (1, 2):
        contents = no_rope(case).scaled(scale)
        for name, x in sample.tensors.items():
            x.copy_(contents.tensors[name])
        for x in outputs:
            x.fill_(torch.nan)
        graph.replay()
        torch.npu.synchronize()
        expected = contents.call(torch.ops.ascend)
        assert_same_bits(tuple(x.cpu() for x in outputs), expected)
    if not warm:
        # The memory of the graph is none that other calls share.
        assert set(launched(no_rope(replace(BSND, s=(9, 31))).to("npu"))).isdisjoint(captured)


@once
def test_inference_mode_makes_zeros_for_training() -> None:
    """In a process of its own, whose first zeros come from inference mode."""
    run_in_new_process(
        """
        import ascend_attn_ops, torch, torch_npu
        query = torch.randn(1, 4, 2, 16, dtype=torch.bfloat16).npu()
        key = torch.randn(1, 4, 1, 16, dtype=torch.bfloat16).npu()
        indices = torch.arange(4, dtype=torch.int32).expand(1, 4, 1, 4).contiguous().npu()
        with ascend_attn_ops.limits(None):
            def attend(query):
                return ascend_attn_ops.sparse_flash_attention(
                    query, key, key, indices, scale_value=0.25, sparse_mode=0)[0]
            with torch.inference_mode():
                attend(query)
            attend(query.requires_grad_()).sum().backward()
            assert query.grad is not None
            torch.npu.synchronize()
        """,
        ASCEND_ATTN_OPS_LIMITS="none",
    )
