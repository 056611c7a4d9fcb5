"""Captured calls on the simulated NPU: replays give the bits of the same calls outside of a graph.

python -m cann_simulator tests/fuzz/run.py --only 'npu/*'
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from random import Random
from typing import Any

import ascend_attn_ops
import torch
from support.gradients import outputs_and_gradients
from support.samples import Sample, bytes_of
from torch import Tensor

from . import valid_autograd
from .case import Case, Finding
from .contexts import ALL, HALF, outcome
from .draw import name_of

RUBBISH = 0x7F
REPLAYS = 2


def results(sample: Sample, with_gradients: bool) -> Sequence[Tensor]:
    if not with_gradients:
        return sample.call(ascend_attn_ops)
    outputs, gradients = outputs_and_gradients(sample, call=lambda leaf: leaf.call(ascend_attn_ops))
    return *outputs, *gradients


def changed(sample: Sample, factor: float) -> Sample:
    return sample.map(lambda x: x * factor if x.is_floating_point() else x)


def captured(random: Random, with_gradients: bool) -> str:
    """One to three calls in a graph, replayed with new contents of their tensors."""
    dtype = random.choice(HALF)
    # Gradients of the others may wait for their lengths, which a graph cannot.
    builds = [valid_autograd.flash] if with_gradients else list(ALL.values())
    originals = [random.choice(builds)(random, dtype) for _ in range(random.randint(1, 3))]
    samples = [x.to("npu") for x in originals]

    def step() -> Sequence[Tensor]:
        return [x for sample in samples for x in results(sample, with_gradients)]

    if outcome(step).error is not None:
        return "refused"
    graph: Any = torch.npu.NPUGraph()  # type: ignore[attr-defined]
    with torch.npu.graph(graph):  # type: ignore[attr-defined]
        outputs = step()
    for _ in range(REPLAYS):
        factor = random.choice((0.5, 0.75, 1.0, -1.0))
        for sample, original in zip(samples, originals, strict=True):
            for name, x in changed(original, factor).tensors.items():
                sample.tensors[name].copy_(x)
        expected = [bytes_of(x.cpu()) for x in step()]
        for x in outputs:
            if x.numel():
                x.detach().view(-1).view(torch.uint8).fill_(RUBBISH)
        graph.replay()
        for number, (x, y) in enumerate(zip(outputs, expected, strict=True)):
            if not torch.equal(bytes_of(x.cpu()), y):
                ids = [f"{sample.operator} {sample.id}" for sample in samples]
                raise Finding(f"result {number} of {ids} differs in a replay, factor {factor}")
    return f"{len(samples)} {name_of(dtype)}"


def can_capture() -> bool:
    """On the simulated NPU, at the levels of the task queue at which torch_npu captures."""
    return "CANN_SIM_SOC" in os.environ and os.environ.get("TASK_QUEUE_ENABLE") != "2"


CASES: dict[str, Case] = {}
if can_capture():
    CASES = {
        "npu/graphs/calls": lambda random: captured(random, with_gradients=False),
        "npu/graphs/training": lambda random: captured(random, with_gradients=True),
    }
