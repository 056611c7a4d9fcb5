"""Requests of other lengths that share steps, against each request alone and without pages."""

from __future__ import annotations

import copy
from typing import Any

import ascend_attn_ops as ops
import dense_model
import plain
import pytest
import torch
from dense_model import KEY_HEADS, SIZE, DenseLM
from torch import Tensor

BLOCK, BLOCKS = 128, 12
INT8 = {"latent": (1, 656, torch.int8), "index": (1, 128, torch.int8),
        "index_scale": (1, 1, torch.float16)}  # fmt: skip


class Request:
    """A text that grows: numbers of tokens, or their hidden states."""

    def __init__(self, text: list[Any]) -> None:
        self.text, self.sequence = text, 0


def place(cache: ops.PagedCache, requests: list[Request]) -> tuple[ops.nn.paged_cache.Step, list]:
    """Appends what the cache does not have, and returns the step and the new tokens."""
    counts, new = {}, []
    for request in requests:
        request.sequence = request.sequence or cache.add()
        new += request.text[cache.length(request.sequence) :]
        counts[request.sequence] = len(request.text) - cache.length(request.sequence)
    return cache.append(counts), new


def forward(model: DenseLM, tokens: Tensor, layers: list[Any]) -> Tensor:
    """Logits of packed tokens (T,), whose keys and values are written to the pages of layers."""
    x = model.embedding(tokens)
    for layer, pages in zip(model.layers, layers, strict=True):
        query, key, value = layer.project(x)
        pages.write(key=key, value=value)
        out, _ = ops.fused_infer_attention_score(
            query, pages.dense("key"), pages.dense("value"), num_key_value_heads=KEY_HEADS,
            sparse_mode=3, **pages.step.options,
        )  # fmt: skip
        x = x + layer.out(out.flatten(-2))
    return model.head(x)


@pytest.mark.parametrize(("layout", "compiled"), [("ND", False), ("ND", True), ("NZ", False)])
def test_dense(layout: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts beside tokens, and requests that share the beginning of another."""
    model = dense_model.DenseLM().bfloat16()
    judge = copy.deepcopy(model).double()
    decode = torch.compile(forward, fullgraph=True) if compiled else forward
    rows = {"key": (KEY_HEADS, SIZE), "value": (KEY_HEADS, SIZE)}
    count = len(model.layers)
    cache = ops.PagedCache(BLOCKS, BLOCK, rows, layers=count, layout=layout, dtype=torch.bfloat16)
    monkeypatch.setattr(dense_model, "attention", plain.attention)

    def prompt(length: int) -> Request:
        return Request(torch.randint(dense_model.VOCABULARY, (length,)).tolist())

    @torch.no_grad()
    def step(*requests: Request) -> None:
        placed, new = place(cache, list(requests))
        run = decode if len(new) == len(requests) else forward
        layers = [cache.layer(i, placed) for i in range(count)]
        logits = run(model, torch.tensor(new), layers)[torch.tensor(placed.query_ends) - 1]
        expected = torch.cat([judge(torch.tensor([x.text]))[:, -1] for x in requests])
        plain.assert_close(logits, expected, torch.bfloat16, "logits")
        for request, token in zip(requests, logits.argmax(-1).tolist(), strict=True):
            request.text.append(token)

    first, second, third = prompt(127), prompt(20), prompt(140)
    step(first, second)
    for _ in range(3):
        step(first, second)
    cache.free(second.sequence)
    step(first, third)  # a prompt beside a token
    step(third, first)

    forks, blocks = [], cache.free_blocks
    for length in (None, BLOCK, 7):
        fork = Request(third.text[:-1][:length] + prompt(2).text)
        fork.sequence = cache.fork(third.sequence, length)
        forks.append(fork)
    assert cache.free_blocks == blocks - 2, "a full block is shared, other rows are copied"
    step(*forks, third)
    cache.free(third.sequence)
    step(*forks, first)
    assert [cache.free(x.sequence) for x in (first, *forks)] == [None] * 4
    assert cache.free_blocks == BLOCKS


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("keys", ["dense", "indexed", "int8"])
def test_latent_attention(keys: str, compiled: bool) -> None:
    """In pages as without, and in float64 as the keys and values of each head have it."""
    heads = 0 if keys == "dense" else 8
    layer = ops.LatentAttention(96, 32, head_dim=32, index_heads=heads, top_k=1024).bfloat16()
    judge = copy.deepcopy(layer).double()
    rows = {"latent": (1, 512), "rope": (1, 64), **({"index": (1, 128)} if heads else {})}
    rows = INT8 if keys == "int8" else rows
    cache = ops.PagedCache(BLOCKS, BLOCK, rows, dtype=torch.bfloat16)
    run = torch.compile(layer, fullgraph=True) if compiled else layer

    @torch.no_grad()
    def step(*requests: Request) -> None:
        placed, new = place(cache, list(requests))
        out, _ = run(torch.stack(new), placed.positions, pages=cache.layer(0, placed))
        parts = out.split(torch.tensor([0, *placed.query_ends]).diff().tolist())
        for request, part in zip(requests, parts, strict=True):
            hidden = torch.stack(request.text)[None]
            expected = plain.per_head(judge, hidden.double())[0, -len(part) :]
            plain.assert_close(part, expected, torch.bfloat16, "out")
            plain.assert_close(layer(hidden)[0][0, -len(part) :], expected, torch.bfloat16, "alone")

    def tokens(count: int) -> list[torch.Tensor]:
        return list(torch.randn(count, 96, dtype=torch.bfloat16))

    first, second = Request(tokens(60)), Request(tokens(9))
    step(first, second)
    for _ in range(2):
        first.text += tokens(1)
        second.text += tokens(1)
        step(first, second)
    second.text += tokens(150)  # the rest of a prompt, over the end of a block
    first.text += tokens(1)
    step(second, first)


@pytest.mark.usefixtures("no_limits")
@pytest.mark.parametrize("compiled", [False, True])
def test_selected_keys_in_int8(compiled: bool) -> None:
    """In float32 and other sizes than the NPU's: against float64 of the numbers in the pages."""
    sizes = {"head_dim": 16, "rope_dim": 8, "latent_dim": 200, "index_heads": 4, "index_dim": 16}
    layer = ops.LatentAttention(48, 4, **sizes, top_k=5)
    judge = copy.deepcopy(layer).double()
    rows = {**INT8, "latent": (1, 240, torch.int8), "index": (1, 16, torch.int8)}
    cache = ops.PagedCache(4, 16, rows)
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    sequence = cache.add()
    for count in (21, 1, 1):
        hidden, step = torch.randn(count, 48), cache.append({sequence: count})
        with torch.no_grad():
            out, _ = run(hidden, step.positions, pages=cache.layer(0, step))
        inputs = layer.project(hidden[None], step.positions)
        row, key, key_scale = (
            ops.gather_paged_kv(x, step.block_table, step.key_lengths)[None]
            for x in cache.pages[0].values()
        )
        numbers, *others = row.split((200, 32, 8), -1)
        rope, scales = (x.contiguous().view(torch.float) for x in others)
        latent = numbers * scales.repeat_interleave(128, -1)[..., :200]
        index_query, index_key, weights = inputs.projections
        key = key.double() * key_scale
        for read, written in ((latent, inputs.latent), (key, index_key)):
            plain.assert_close(read[:, -count:], written, torch.bfloat16, "rows")
        query, scale = ops.quantize_index_keys(index_query)
        scores = plain.indexer_scores(query, key, weights.half().double() * scale)
        chosen = scores.isinf().logical_not().scatter(-1, scores.argsort(-1)[..., :-5], False)
        expected, _ = plain.sparse_attention(*inputs[:2], latent, rope, chosen, layer.scale)
        expected = torch.einsum("bsnc,ncv->snv", expected, judge.absorbed_value)
        plain.assert_close(out, judge.out(expected.flatten(-2)), torch.float32)


@pytest.mark.usefixtures("no_limits")
@pytest.mark.parametrize("rank", [None, 24])
@pytest.mark.parametrize("compiled", [False, True])
def test_latent_attention_learns(compiled: bool, rank: int | None) -> None:
    """In float64: the output is that of each head's keys and values among those selected, and one
    backward gives the gradients of both losses."""
    sizes: dict[str, Any] = {"head_dim": 16, "rope_dim": 8, "latent_dim": 32, "query_rank": rank}
    layer = ops.LatentAttention(48, 4, **sizes, index_heads=4, index_dim=16, top_k=5).double()
    judge = copy.deepcopy(layer)
    hidden = torch.randn(2, 14, 48, dtype=torch.float64)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    out, loss = run(hidden)
    inputs = judge.project(hidden)
    indices = judge.indexer.select(inputs.projections, 5)
    assert not indices.requires_grad
    scores = plain.indexer_scores(*inputs.projections)
    plain.assert_best_keys(indices, scores, 5, margin=1e-9)
    chosen = plain.chosen_keys(indices, 14)
    expected = plain.per_head(judge, hidden, chosen)
    _, weights = plain.sparse_attention(*inputs[:4], chosen, judge.scale)
    expected_loss = plain.divergence(weights, scores, chosen)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    (out.square().sum() + loss).backward()
    (expected.square().sum() + expected_loss).backward()
    for (name, x), y in zip(layer.named_parameters(), judge.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-6, msg=name)


def test_wrong_calls() -> None:
    """Nothing has changed after one."""
    rows = {"key": (1, 64), "value": (1, 64), "scale": (1, 16, torch.int8)}
    cache = ops.PagedCache(3, 16, rows, dtype=torch.bfloat16)
    cache.append({(first := cache.add()): 20})
    for method, text, call in (
        ("append", "new blocks: expected at most 1, which are free of 3, got 2",
            lambda: cache.append({first: 12, cache.add(): 17})),
        ("reserve", "new blocks: .* got 3", lambda: cache.reserve({first: 70})),
        ("append", "sequence: expected a sequence of add", lambda: cache.append({first: 13, 9: 1})),
        ("append", "counts: expected at least 0, got -1", lambda: cache.append({first: -1})),
        ("fork", "length: expected 0..20, got 21", lambda: cache.fork(first, 21)),
        ("free", "sequence: expected", lambda: cache.free(9)),
        ("", "layout: expected 'ND' or 'NZ'", lambda: ops.PagedCache(1, 1, rows, layout="BSND")),
    ):  # fmt: skip
        name = f"PagedCache.{method}".rstrip(".")
        with pytest.raises((ValueError, RuntimeError), match=f"^ascend::{name}: {text}"):
            call()
        assert (cache.length(first), cache.free_blocks) == (20, 1)
    layer = cache.layer(0, cache.append({first: 1}))
    layer.write(**{name: x.new_full((1, *x.shape[2:]), 3) for name, x in layer.pages.items()})
    with pytest.raises(
        ValueError, match=r"PagedCache.write: part: expected one of 'key', .* 'keys'"
    ):
        layer.write(keys=torch.ones(1, 1, 64))
    assert all(x[1, 4].sum() == x.sum() == 3 * x.shape[-1] for x in layer.pages.values())
    assert repr(cache).startswith("PagedCache(3 blocks of 16, 1 free; 2 sequences; 1 layers")
    layer, cache = ops.LatentAttention(8, 1).half(), ops.PagedCache(1, 16, INT8)
    pages = cache.layer(0, cache.append({cache.add(): 2}))
    with pytest.raises(ValueError, match=r"LatentAttention.forward: indices: .* got None"):
        layer(torch.ones(2, 8).half(), pages.step.positions, pages=pages)
