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
from ascend_attn_check.gradients import differentiable_names, incoming_gradients
from support.samples import OPERATORS, Sample, bytes_of
from torch import Tensor

from . import valid_autograd
from .case import Case, Finding
from .contexts import ALL, HALF
from .draw import name_of

RUBBISH = 0x7F
REPLAYS = 2


class Step:
    """A call, and its gradients if the sample's tensors want some."""

    def __init__(self, sample: Sample, with_gradients: bool) -> None:
        self.sample = sample
        names = differentiable_names(sample) if with_gradients else ()
        if names:
            self.sample = sample.requires_grad(names)
            # Made on the host, which a capture cannot wait for.
            self.incoming = incoming_gradients(sample, sample.call(ascend_attn_ops))
        self.leaves = [self.sample.tensors[name] for name in names]

    def __call__(self) -> Sequence[Tensor]:
        outputs = self.sample.call(ascend_attn_ops)
        if not self.leaves:
            return outputs
        differentiated = OPERATORS[self.sample.operator].gradient_outputs(outputs)
        gradients = torch.autograd.grad(differentiated, self.leaves, self.incoming)
        return *(x.detach() for x in outputs), *gradients

    def fill(self, contents: Sample) -> None:
        with torch.no_grad():
            for name, x in contents.tensors.items():
                self.sample.tensors[name].copy_(x)


def captured(random: Random, with_gradients: bool) -> str:
    """One to three calls in a graph, replayed with new contents of their tensors."""
    dtype = random.choice(HALF)
    # Gradients of the others may wait for their lengths, which a graph cannot.
    builds = [valid_autograd.flash] if with_gradients else list(ALL.values())
    originals = [random.choice(builds)(random, dtype) for _ in range(random.randint(1, 3))]
    ids = [f"{x.operator} {x.id}" for x in originals]
    steps: list[Step] = []

    def step() -> Sequence[Tensor]:
        return [x for one in steps for x in one()]

    try:
        steps += [Step(x.to("npu"), with_gradients) for x in originals]
        step()
    except (TypeError, ValueError, RuntimeError) as error:
        # A kernel that fails stops the queue, and with it all later cases.
        if "working operator name" in str(error) or "queue has stopped" in str(error):
            raise
        return "refused"  # the device does not take it
    graph: Any = torch.npu.NPUGraph()  # type: ignore[attr-defined]
    with torch.npu.graph(graph):  # type: ignore[attr-defined]
        outputs = step()
    for _ in range(REPLAYS):
        factor = random.choice((0.25, 0.5, 0.75))
        for one, original in zip(steps, originals, strict=True):
            one.fill(original.scaled(factor))
        expected = [bytes_of(x.cpu()) for x in step()]
        for x in outputs:
            if x.numel():
                x.view(-1).view(torch.uint8).fill_(RUBBISH)
        graph.replay()
        for number, (x, y) in enumerate(zip(outputs, expected, strict=True)):
            if not torch.equal(bytes_of(x.cpu()), y):
                raise Finding(f"result {number} of {ids} differs in a replay, factor {factor}")
    return f"{len(steps)} {name_of(dtype)}"


def can_capture() -> bool:
    """On the simulated NPU, at the levels of the task queue at which torch_npu captures."""
    return "CANN_SIM_SOC" in os.environ and os.environ.get("TASK_QUEUE_ENABLE") != "2"


def unchecked(random: Random, with_gradients: bool) -> str:
    """Runs a case that may go beyond the device's limits, where its kernels are wrong."""
    import cann_simulator

    with cann_simulator.unchecked("bounds", "hang", "results"):
        return captured(random, with_gradients)


CASES: dict[str, Case] = {}
if can_capture():
    CASES = {
        "npu/graphs/calls": lambda random: unchecked(random, with_gradients=False),
        "npu/graphs/training": lambda random: unchecked(random, with_gradients=True),
    }
