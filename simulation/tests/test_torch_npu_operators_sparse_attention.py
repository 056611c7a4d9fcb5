"""The operators of DeepSeek Sparse Attention in torch_npu on the simulated NPU."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import cann_simulator
import pytest
import torch
import torch_npu
from plain_attention import TOLERANCES, attention, kept_by_mode, statistics, takes, values
from support.tolerance import assert_close
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_leak")

SCALE = 0.05
B, S, SKV, N, D, ROPE, COUNT = 2, 6, 40, 8, 512, 64, 16
INDEX_HEADS, INDEX_D = 8, 128
BF16 = torch.bfloat16
DTYPES = [torch.float16, torch.bfloat16]


def main_tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    """(B, S, N, D): the absorbed form of multi-head latent attention, with one key head."""
    shapes = {
        "query": (B, S, N, D),
        "key": (B, SKV, 1, D),
        "query_rope": (B, S, N, ROPE),
        "key_rope": (B, SKV, 1, ROPE),
    }
    return {
        name: values(*shape, seed=i).to(dtype) for i, (name, shape) in enumerate(shapes.items())
    }


def index_tensors(dtype: torch.dtype) -> list[Tensor]:
    """Query, key and weights of the indexer."""
    shapes = (B, S, INDEX_HEADS, INDEX_D), (B, SKV, 1, INDEX_D), (B, S, INDEX_HEADS)
    return [values(*shape, seed=10 + i).to(dtype) for i, shape in enumerate(shapes)]


def selection() -> Tensor:
    """(B, S, 1, COUNT): keys that the query may see, and -1 behind them."""
    chosen = torch.full((B, S, 1, COUNT), -1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    for b in range(B):
        for i in range(S):
            visible = SKV - S + i + 1
            count = COUNT - 3 * (i == 0)
            chosen[b, i, 0, :count] = torch.randperm(visible, generator=generator)[:count]
    return chosen


def kept_by(chosen: Tensor) -> Tensor:
    """(B, 1, S, SKV)."""
    kept = torch.zeros(B, S, SKV + 1, dtype=torch.bool)
    kept.scatter_(2, chosen[:, :, 0].long().where(chosen[:, :, 0] >= 0, SKV), True)
    return kept[:, None, :, :SKV]


def heads_first(x: Tensor) -> Tensor:
    return x.double().transpose(1, 2)


def whole(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key with their ropes, and value, as (B, N, S, D)."""
    q = torch.cat([heads_first(tensors["query"]), heads_first(tensors["query_rope"])], -1)
    k = torch.cat([heads_first(tensors["key"]), heads_first(tensors["key_rope"])], -1)
    return q, k, heads_first(tensors.get("value", tensors["key"]))


def on_npu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.npu() for name, x in tensors.items()}


def sparse(given: dict[str, Tensor], chosen: Tensor, **options: Any) -> tuple[Tensor, ...]:
    given = {"value": given["key"]} | given
    return torch_npu.npu_sparse_flash_attention(
        given["query"],
        given["key"],
        given["value"],
        chosen,
        SCALE,
        query_rope=given["query_rope"],
        key_rope=given["key_rope"],
        attention_mode=2,
        **options,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_flash_attention(dtype: torch.dtype) -> None:
    tensors, chosen = main_tensors(dtype), selection()
    tensors["value"] = tensors["key"]
    names = ("query", "key", "value", "query_rope", "key_rope")
    exact = {name: tensors[name].double().requires_grad_() for name in names}
    given = {name: tensors[name].npu().requires_grad_() for name in names}
    dy = values(B, S, N, D, seed=9).to(dtype)
    q, k, v = whole(exact)
    out = attention(q, k, v, scale=SCALE, kept=kept_by(chosen)).transpose(1, 2)
    gradients = torch.autograd.grad(out, tuple(exact.values()), dy.double())
    # By the formulas: the device takes no value of its own, and no padding in the gradient.
    with cann_simulator.unchecked("bounds", "results"):
        results = sparse(given, chosen.npu(), return_softmax_lse=True)
        actual = torch.autograd.grad(results[0], tuple(given.values()), dy.npu())
    assert_close("out", results[0].cpu(), out, TOLERANCES[dtype])
    for name, x, y in zip(names, actual, gradients, strict=True):
        assert_close(f"gradient of {name}", x.cpu(), y, TOLERANCES[dtype])
    _, top, total = statistics(q, k, scale=SCALE, kept=kept_by(chosen))
    for name, x, y in (("max", results[1], top), ("sum", results[2], total)):
        # (B, Nk, S, N / Nk)
        assert_close(name, x.cpu()[:, 0], y[..., 0].transpose(1, 2), TOLERANCES[torch.float32])


@takes("npu_sparse_flash_attention", "sinks")
def test_sinks() -> None:
    tensors, chosen, sinks = main_tensors(BF16), selection(), values(N, seed=5).float()
    out = sparse(on_npu(tensors), chosen.npu(), sinks=sinks.npu())[0]
    q, k, v = whole(tensors)
    expected = attention(q, k, v, scale=SCALE, kept=kept_by(chosen), sinks=sinks.double())
    assert_close("out", out.cpu(), expected.transpose(1, 2), TOLERANCES[BF16])


BLOCK = 16


def in_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """(blocks, BLOCK, N, D) of (B, S, N, D), and the table of the blocks."""
    per_batch = -(-x.size(1) // BLOCK)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, per_batch * BLOCK - x.size(1)))
    blocks = padded.unflatten(1, (per_batch, BLOCK)).flatten(0, 1)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))
    cache = torch.empty_like(blocks)
    cache[order] = blocks
    return cache, order.view(-1, per_batch).int()


@pytest.mark.parametrize("layout", ["BSND", "TND"])
def test_paged(layout: str) -> None:
    """Keys in blocks, with the lengths of the sequences, for dense and for packed queries."""
    tensors, chosen, index = main_tensors(BF16), selection(), index_tensors(BF16)
    paged = dict(tensors)
    for name in ("key", "key_rope"):
        paged[name], table = in_blocks(tensors[name])
    paged_index = [index[0], in_blocks(index[1])[0], index[2]]
    key_lengths = torch.full((B,), SKV, dtype=torch.int32)
    options = {"block_table": table.npu(), "layout_query": layout}
    chosen_given = chosen
    if layout == "TND":
        for name in ("query", "query_rope"):
            paged[name] = paged[name].flatten(0, 1)
        chosen_given = chosen.flatten(0, 1)
        paged_index = [paged_index[0].flatten(0, 1), paged_index[1], paged_index[2].flatten(0, 1)]
        ends = torch.tensor(list(accumulate([S] * B)), dtype=torch.int32)
        options["actual_seq_lengths_query"] = ends.npu()
    out = sparse(
        on_npu(paged),
        chosen_given.npu(),
        layout_kv="PA_BSND",
        actual_seq_lengths_kv=key_lengths.npu(),
        **options,
    )[0]
    q, k, v = whole(tensors)
    expected = attention(q, k, v, scale=SCALE, kept=kept_by(chosen)).transpose(1, 2)
    assert_close("out", out.cpu().view(expected.shape), expected, TOLERANCES[BF16])

    indices, _ = torch_npu.npu_lightning_indexer(
        *(x.npu() for x in paged_index),
        layout_key="PA_BSND",
        actual_seq_lengths_key=key_lengths.npu(),
        sparse_count=COUNT,
        **options,
    )
    check_selection(indices.cpu().view(B, S, COUNT), index_scores(*index), BF16)


def index_scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """(B, S, SKV), and -inf for keys that the query may not see."""
    products = torch.einsum("bihd,bjd->bihj", query.double(), key[:, :, 0].double())
    scores = torch.einsum("bihj,bih->bij", products.relu(), weights.double())
    return scores.masked_fill(~kept_by_mode(3, S, SKV), -torch.inf)


def check_selection(indices: Tensor, scores: Tensor, dtype: torch.dtype) -> None:
    """Each row has the keys of the best scores, up to the rounding of the last."""
    chosen = scores.gather(2, indices.long())
    best = scores.topk(COUNT).values
    assert_close("scores", chosen.sort(descending=True).values, best, TOLERANCES[dtype])
    assert all(len(row.unique()) == COUNT for row in indices.flatten(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_lightning_indexer(dtype: torch.dtype) -> None:
    index = index_tensors(dtype)
    scores = index_scores(*index)
    given = [x.npu() for x in index]
    options = {"sparse_count": COUNT, "return_value": True}
    indices, best = torch_npu.npu_lightning_indexer(*given, **options)
    check_selection(indices.cpu()[:, :, 0], scores, dtype)
    chosen = scores.gather(2, indices.cpu()[:, :, 0].long())
    assert_close("values", best.cpu()[:, :, 0], chosen, TOLERANCES[dtype])

    exact = [x.double().requires_grad_() for x in index]
    dy = values(B, S, 1, COUNT, seed=9).to(dtype)
    selected = index_scores(*exact).gather(2, indices.cpu()[:, :, 0].long())
    expected = torch.autograd.grad(selected, exact, dy[:, :, 0].double())
    query, key, weights = given
    actual = torch_npu.npu_lightning_indexer_grad(query, key, dy.npu(), indices, weights)
    for name, x, y in zip(("query", "key", "weights"), actual, expected, strict=True):
        assert_close(f"gradient of {name}", x.cpu(), y, TOLERANCES[dtype])


def loss_arguments(dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
    """The arguments by position, the ropes, and the main attention's probabilities."""
    tensors, chosen, index = main_tensors(dtype), selection(), index_tensors(dtype)
    # Scores of unit scale: a softmax that is not of one key alone.
    index[2] = index[2] / 64
    q, k, _ = whole(tensors)
    weights, top, total = statistics(q, k, scale=SCALE, kept=kept_by(chosen))
    as_stored = [x[..., 0].transpose(1, 2)[:, None].float() for x in (top, total)]
    given = [tensors["query"], tensors["key"], *index, chosen, *as_stored]
    ropes = {name: tensors[name] for name in ("query_rope", "key_rope")}
    return given, ropes, (weights / total).mean(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_indexer_loss(dtype: torch.dtype) -> None:
    given, ropes, target = loss_arguments(dtype)
    chosen = given[5]
    *actual, loss = torch_npu.npu_sparse_lightning_indexer_grad_kl_loss(
        *(x.npu() for x in given), SCALE, **on_npu(ropes)
    )
    exact = [x.double().requires_grad_() for x in given[2:5]]
    scores = index_scores(*exact).masked_fill(~kept_by(chosen)[:, 0], -torch.inf)
    log_y = scores.log_softmax(-1)
    kept = kept_by(chosen)[:, 0]
    terms = torch.where(kept, target * (target.clamp(min=1e-8).log() - log_y.where(kept, 0)), 0)
    expected = torch.autograd.grad(terms.sum(), exact)
    names = ("query_index", "key_index", "weights")
    for name, x, y in zip(names, actual, expected, strict=True):
        assert_close(f"gradient of {name}", x.cpu(), y, TOLERANCES[dtype])
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.cpu().double(), terms.sum().view(1), rtol=1e-2, atol=1e-3)
