"""DeepSeek-V4 over our operators, against transformers' own eager attention."""

from __future__ import annotations

from functools import partial

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import test_sparse_models  # noqa: E402
from ascend_attn_ops.transformers import enable_dsa  # noqa: E402
from ascend_attn_ops.transformers._layers import CACHE  # noqa: E402
from support.small_models import SMALL_V4, make, packing, padding, tokens  # noqa: E402
from test_sparse_models import indexer_parameters  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_limits")

# Norms and logits are rounded to float32 by the model itself.
CLOSE = {"rtol": 1e-9, "atol": 1e-10}


pair = partial(test_sparse_models.pair, "DeepSeek-V4")


@pytest.mark.parametrize("length", [29, 8, 3, 1])
def test_logits_and_gradients_are_those_of_eager(length: int) -> None:
    """Also without a whole window of tokens, and without a compressed key."""
    eager, ours = pair()
    text = tokens(2, length)
    labels = text if length > 1 else None
    results = [model(text, labels=labels, use_cache=False) for model in (eager, ours)]
    torch.testing.assert_close(results[1].logits, results[0].logits, **CLOSE)
    for result in results:
        result.logits.square().mean().backward()
    compared = 0
    for (name, x), y in zip(eager.named_parameters(), ours.parameters(), strict=True):
        if ".indexer." not in name:
            assert (x.grad is None) == (y.grad is None), name
            if x.grad is not None:
                torch.testing.assert_close(y.grad, x.grad, **CLOSE, msg=name)
                compared += 1
    # Without a compressed key its parameters have no gradient, with either model.
    assert compared == (80 if length >= 8 else 72)


@pytest.mark.parametrize("prompt", [1, 3, 4, 11])
def test_generates_what_eager_does(prompt: int) -> None:
    eager, ours = pair()
    text = tokens(2, prompt)
    arguments = {"max_new_tokens": 22, "min_new_tokens": 22, "do_sample": False}
    assert torch.equal(ours.generate(text, **arguments), eager.generate(text, **arguments))


@pytest.mark.parametrize("chunks", [(29,), (5, 24), (8, 1, 1, 19), (3, 3, 3, 20)])
def test_a_cache_changes_nothing(chunks: tuple[int, ...]) -> None:
    _, ours = pair()
    text = tokens(2, 29)
    cache = transformers.DynamicCache(config=ours.config)
    with torch.no_grad():
        expected = ours(text, use_cache=False).logits
        parts = [ours(x, past_key_values=cache).logits for x in text.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-5, atol=1e-5)


def test_packed_sequences_are_compressed_each_by_itself() -> None:
    _, ours = pair()
    lengths = (13, 1, 15)
    text = tokens(1, sum(lengths))
    together = ours(text, **packing(1, lengths, gap=0)).logits
    alone = [ours(x, use_cache=False).logits for x in text.split(lengths, dim=1)]
    torch.testing.assert_close(together, torch.cat(alone, 1), rtol=1e-5, atol=1e-5)


def test_the_models_own_backward_trains_the_indexer() -> None:
    _, ours = pair(torch.float32)
    optimizer = torch.optim.Adam(indexer_parameters(ours).values(), lr=1e-3)
    history = []
    for _ in range(8):
        optimizer.zero_grad()
        ours(tokens(), labels=tokens()).loss.backward()
        optimizer.step()
        history.append(float(ours.indexer_losses()[1]))
    assert list(ours.indexer_losses()) == [1]
    assert history == sorted(history, reverse=True)


def test_what_is_not_trained_gets_nothing() -> None:
    _, ours = pair()
    for x in indexer_parameters(ours).values():
        x.requires_grad_(False)
    ours(tokens(), labels=tokens()).loss.backward()
    assert ours.indexer_losses() == {}
    assert all(x.grad is None for x in indexer_parameters(ours).values())


def test_a_bfloat16_model() -> None:
    eager, ours = pair(torch.bfloat16)
    with torch.no_grad():
        expected, actual = eager(tokens()).logits, ours(tokens()).logits
    assert actual.dtype == torch.bfloat16
    # Eager rounds every score and weight to bfloat16.
    difference = (actual - expected).float().norm() / expected.float().norm()
    assert difference < 0.05


def test_padding_behind_the_text_changes_nothing() -> None:
    eager, ours = pair()
    text, padded = tokens(), padding("right")
    valid = padded["attention_mask"].bool()
    expected, actual = (model(text, use_cache=False, **padded).logits for model in (eager, ours))
    torch.testing.assert_close(actual[valid], expected[valid], **CLOSE)
    found = []
    for arguments, tokens_ in ((padding("right", 1), tokens(1)), ({}, tokens(1)[:, :-7])):
        ours.zero_grad()
        labels = tokens_.masked_fill(arguments.get("attention_mask", tokens_) == 0, -100)
        ours(tokens_, labels=labels, **arguments).loss.backward()
        found.append(({x: y.grad for x, y in ours.named_parameters()}, ours.indexer_losses()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-7)


def test_padding_before_the_text_or_beside_a_cache_is_refused() -> None:
    _, ours = pair()
    cache = transformers.DynamicCache(config=ours.config)
    for side, more in (("left", {}), ("right", {CACHE: cache})):
        with pytest.raises(NotImplementedError, match="would compress as text"):
            ours(tokens(), **padding(side), **more)
    with pytest.raises(NotImplementedError, match=f"{CACHE}: .* pass use_cache=False"):
        ours(tokens(), position_ids=packing()["position_ids"], **{CACHE: cache})


def test_options_that_its_layers_have_not() -> None:
    model = make("DeepSeek-V4", **SMALL_V4)
    with pytest.raises(NotImplementedError, match="dense_warmup"):
        enable_dsa(model, dense_warmup=True)
    with pytest.raises(NotImplementedError, match="attention_dropout"):
        enable_dsa(make("DeepSeek-V4", **SMALL_V4, attention_dropout=0.1))
    assert not hasattr(model, "indexer_losses")
