"""sparse_flash_mla_with_indexer_loss: the attention's gradients, and those of the indexer."""

from __future__ import annotations

import math
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

RATIO, TOKENS, K = 4, 22, 3
ATTENTION = {"scale_value": 0.3, "cmp_ratio": RATIO, "ori_win_left": 5}


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "query": (2, TOKENS, 4, 16), "ori_kv": (2, TOKENS, 1, 16),
        "cmp_kv": (2, TOKENS // RATIO, 1, 16), "query_index": (2, TOKENS, 8, 12),
        "key_index": (2, TOKENS // RATIO, 1, 12), "weights": (2, TOKENS, 8), "sink": (4,),
    }  # fmt: skip
    made = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    for name in ("weights", "sink"):
        made[name] = made[name].to(statistics)
    return {name: x.requires_grad_() for name, x in made.items()}


def select(given: dict[str, Tensor]) -> Tensor:
    indexer = (given[name].detach() for name in ("query_index", "key_index", "weights"))
    indices, _ = ops.lightning_indexer(*indexer, sparse_count=K, cmp_ratio=RATIO)
    return indices


def attend(given: dict[str, Tensor], indices: Tensor, **options: Any) -> Tensor:
    return ops.sparse_flash_mla_with_indexer_loss(
        given["query"], given["ori_kv"], given["cmp_kv"], indices, given["query_index"],
        given["key_index"], given["weights"], sink=given["sink"], **ATTENTION, **options,
    )  # fmt: skip


def gradients(out: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
    d_out = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    found = torch.autograd.grad(out, list(given.values()), d_out, allow_unused=True)
    return {name: x for name, x in zip(given, found, strict=True) if x is not None}


@pytest.mark.parametrize("weight", [1.0, 0.25, torch.tensor(3.0)])
def test_both_gradients_at_once(weight: float | Tensor) -> None:
    given = inputs()
    indices = select(given)
    losses: list[Tensor] = []
    found = gradients(
        attend(given, indices, indexer_loss_weight=weight, on_loss=losses.append), given
    )
    plain, lse = ops.sparse_flash_mla(
        given["query"], given["ori_kv"], given["cmp_kv"], indices, sink=given["sink"], **ATTENTION
    )
    expected = gradients(plain, given)
    target = ops.sparse_flash_mla_grad(
        *(given[x].detach() for x in ("query", "ori_kv", "cmp_kv")), indices,
        torch.zeros_like(plain), plain.detach(), lse.detach(), sink=given["sink"].detach(),
        **ATTENTION,
    )[-1]  # fmt: skip
    # The loss by its definition, from the scores.
    scores = torch.einsum("bqhd,bkd->bqhk", given["query_index"], given["key_index"].squeeze(2))
    scores = (scores.relu() * given["weights"].unsqueeze(-1)).sum(2)
    kept = indices.squeeze(2) >= 0
    scores = scores.gather(-1, indices.squeeze(2).clamp(min=0).long())
    logarithms = scores.masked_fill(~kept, -torch.inf).log_softmax(-1).masked_fill(~kept, 0)
    p = target.squeeze(2)
    loss = (torch.xlogy(p, p) - p * logarithms).sum()
    learners = ("query_index", "key_index", "weights")
    of_loss = torch.autograd.grad(loss, [given[name] for name in learners])
    expected |= {name: x * weight for name, x in zip(learners, of_loss, strict=True)}
    assert found.keys() == given.keys() == expected.keys()
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], msg=name)
    assert len(losses) == 1
    assert losses[0].shape == (1,)
    assert not losses[0].requires_grad
    clamped = torch.xlogy(p, p) - p * logarithms.clamp(min=math.log(1e-8))
    torch.testing.assert_close(losses[0].squeeze(), clamped.sum().detach())


def test_only_the_indexer_learns() -> None:
    given = inputs()
    for name in ("query", "ori_kv", "cmp_kv", "sink"):
        given[name].requires_grad_(False)
    learned = {name: x for name, x in given.items() if x.requires_grad}
    found = gradients(attend(given, select(given)), learned)
    assert all(x.abs().max() > 0 for x in found.values())
    assert len(found) == 3


def test_only_the_attention_learns() -> None:
    given = inputs()
    for name in ("query_index", "key_index", "weights"):
        given[name].requires_grad_(False)
    losses: list[Tensor] = []
    attend(given, select(given), on_loss=losses.append).sum().backward()
    assert losses == []
    assert given["query"].grad is not None


def test_no_second_derivative() -> None:
    given = inputs()
    out = attend(given, select(given))
    (first,) = torch.autograd.grad(out.square().sum(), given["query"], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(first.sum(), given["query"])


def test_autocast_casts_what_the_operators_cast() -> None:
    given = inputs(torch.float32)
    indices = select(given)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(given, indices)
    assert out.dtype == torch.bfloat16
    found = gradients(out, given)
    assert {x.dtype for x in found.values()} == {torch.float32}
    half = {
        name: x.detach().bfloat16().requires_grad_() if name not in ("weights", "sink") else x
        for name, x in given.items()
    }
    for name, x in gradients(attend(half, indices), half).items():
        torch.testing.assert_close(found[name], x.float(), msg=name)


def test_limits_hold_in_the_backward() -> None:
    """Autograd's thread of a device is outside of the block in which the forward was."""
    given = inputs(torch.bfloat16)
    with ops.limits("A2"), pytest.raises(ValueError, match="on Ascend A2"):
        attend(given, select(given))
    with ops.limits(None):
        out = attend(given, select(given))
    with ops.limits("A2"):
        assert gradients(out, given).keys() == given.keys()


def test_compiled() -> None:
    given = inputs()
    indices = select(given)
    expected = gradients(attend(given, indices, indexer_loss_weight=0.5), given)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    found = gradients(compiled(given, indices, indexer_loss_weight=0.5), given)
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], rtol=0, atol=0, msg=name)
