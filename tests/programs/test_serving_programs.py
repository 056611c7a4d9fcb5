"""Requests of other lengths that share steps, against each request alone and without pages."""

from __future__ import annotations

import copy

import dense_model
import dsa_model
import plain
import pytest
import torch
from serving import BLOCKS, Request, Server, SparseLayerServer, forward

COUNT = 16


def prompt(length: int) -> Request:
    return Request(torch.randint(dense_model.VOCABULARY, (length,)).tolist())


@pytest.mark.parametrize("compiled", [False, True])
def test_dense(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dense_model.DenseLM().bfloat16()
    judge = copy.deepcopy(model).double()
    server = Server(model, torch.compile(forward, fullgraph=True) if compiled else forward)
    monkeypatch.setattr(dense_model, "attention", plain.attention)

    def step(*requests: Request) -> None:
        logits = server.step(list(requests))
        texts = [torch.tensor([x.text[:-1]]) for x in requests]
        expected = torch.cat([judge(text)[:, -1] for text in texts])
        plain.assert_close(logits, expected, torch.bfloat16, "logits")

    first, second, third = prompt(127), prompt(20), prompt(140)
    step(first, second)
    for _ in range(3):
        step(first, second)
    server.pages.end(second)
    step(first, third)  # a prompt beside a token
    step(third, first)
    server.pages.end(first)
    server.pages.end(third)
    assert sorted(server.pages.free) == list(range(BLOCKS))


def test_sparse() -> None:
    layer = dsa_model.Layer().bfloat16()
    judge = copy.deepcopy(layer).double()
    server = SparseLayerServer(layer, COUNT)

    def step(*requests: Request) -> None:
        counts = [len(x.text) - x.cached for x in requests]
        results = (x.split(counts) for x in server.step(list(requests)))
        for request, out, keys in zip(requests, *results, strict=True):
            hidden = torch.stack(request.text)[None].double()
            projected = [
                x if i > 1 else x[:, -len(out) :] for i, x in enumerate(judge.project(hidden))
            ]
            query_index, key_index, weights = judge.indexer(hidden)
            new = slice(-len(out), None)
            scores = plain.indexer_scores(query_index[:, new], key_index, weights[:, new])
            plain.assert_best_keys(keys[None], scores, COUNT)
            chosen = plain.chosen_keys(keys[None], hidden.shape[1])
            expected, _ = plain.sparse_attention(*projected, chosen, dsa_model.SCALE)
            plain.assert_close(out, expected[0], torch.bfloat16, "out")

    def tokens(count: int) -> list[torch.Tensor]:
        return list(torch.randn(count, dsa_model.HIDDEN, dtype=torch.bfloat16))

    first, second = Request(tokens(60)), Request(tokens(9))
    step(first, second)
    for _ in range(2):
        for request in (first, second):
            request.text += tokens(1)
        step(first, second)
    second.text += tokens(150)  # the rest of a prompt, over the end of a block
    first.text += tokens(1)
    step(second, first)
