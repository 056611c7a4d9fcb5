"""Random operators in captured graphs: every replay draws the numbers of an eager call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_npu
from support.simulated_npu import captured
from torch import Tensor
from torch.nn import functional as F
from torch_npu_calls import takes

pytestmark = captured

Drawing = Callable[[], Tensor]


def capture(draw: Drawing) -> tuple[torch.npu.NPUGraph, Tensor]:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = draw()
    return graph, result


def ones() -> Tensor:
    return torch.ones(64, device="npu")


DRAWINGS: dict[str, Drawing] = {
    "rand": lambda: torch.rand(64, device="npu"),
    "randn, twice": lambda: torch.randn(64, device="npu") - torch.randn(64, device="npu"),
    "dropout": lambda: F.dropout(ones(), 0.5),
    "in place": lambda: ones().normal_(),
    "randperm": lambda: torch.randperm(64, device="npu"),
    "multinomial": lambda: torch.multinomial(ones(), 8),
    "attention": lambda: torch_npu.npu_fusion_attention_v3(
        *[ones().half().view(1, 1, 16, 4)] * 3, 1, "BNSD", keep_prob=0.5
    )[0],
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=takes("npu_fusion_attention_v3") if x == "attention" else ())
     for x in DRAWINGS],
)  # fmt: skip
def test_replays_go_on_where_the_last_call_ended(name: str) -> None:
    """A replay draws what the same operators draw from the same state of the generator."""
    draw = DRAWINGS[name]
    graph, result = capture(draw)
    torch.npu.manual_seed(3)
    expected = [draw().cpu() for _ in range(3)]
    torch.npu.manual_seed(3)
    found = []
    for _ in range(2):
        graph.replay()
        found.append(result.cpu())
    found.append(draw().cpu())
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert not torch.equal(found[0], found[1])


def test_a_capture_draws_nothing_and_the_cpu_draws_its_own_numbers() -> None:
    torch.npu.manual_seed(5)
    before = torch.npu.get_rng_state()
    graph, _ = capture(DRAWINGS["dropout"])
    assert torch.equal(torch.npu.get_rng_state(), before)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    graph.replay()
    assert torch.equal(torch.rand(4), expected)


def test_generators_that_a_graph_knows() -> None:
    generator = torch.Generator("npu")
    graph = torch.npu.NPUGraph()
    graph.register_generator_state(generator)
    with torch.npu.graph(graph):
        result = torch.rand(64, device="npu", generator=generator)
    generator.manual_seed(7)
    expected = [torch.rand(64, device="npu", generator=generator).cpu() for _ in range(2)]
    generator.manual_seed(7)
    for y in expected:
        graph.replay()
        assert torch.equal(result.cpu(), y)


def test_dropout_and_its_gradient() -> None:
    x = ones().requires_grad_()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = F.dropout(x, 0.5)
        (gradient,) = torch.autograd.grad(y.sum(), x)
    for _ in range(2):
        graph.replay()
        assert torch.equal(gradient, y)
        assert sorted(set(y.tolist())) == [0, 2]
