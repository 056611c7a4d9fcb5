"""Attention in float64, from its definition and with autograd, by which programs are judged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dsa_model
import torch
from support.attention import attention as by_definition
from support.attention import causal
from torch import Tensor, nn


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of (B, S, N, D), with fewer heads in key and value."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    seen = causal(q.shape[2], k.shape[2])
    return by_definition(q, k, v, seen, q.shape[-1] ** -0.5)[0].transpose(1, 2)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, ends: list[int]) -> Tensor:
    """The same of (T, N, D), for each sequence alone."""
    parts = zip([0, *ends], ends, strict=False)
    return torch.cat([attention(*(x[None, a:b] for x in (query, key, value)))[0] for a, b in parts])


def indexer_scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """(B, S, keys), -inf where a key is not visible."""
    products = torch.einsum("bqhd,bkd->bqhk", query.double(), key.double().squeeze(2)).relu()
    scores = torch.einsum("bqhk,bqh->bqk", products, weights.double())
    return scores.masked_fill(~causal(*scores.shape[1:]), -torch.inf)


def sparse_attention(
    query: Tensor, query_rope: Tensor, latent: Tensor, key_rope: Tensor, chosen: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and weights (B, S, N, keys), where `chosen` (B, S, keys) is True."""
    q, k = (torch.cat(x, -1).double() for x in ((query, query_rope), (latent, key_rope)))
    scores = torch.einsum("bqnd,bkd->bqnk", q, k.squeeze(2)) * scale
    weights = scores.masked_fill(~chosen.unsqueeze(2), -torch.inf).softmax(-1)
    return torch.einsum("bqnk,bkd->bqnd", weights, latent.double().squeeze(2)), weights


def per_head(layer: Any, hidden: Tensor, chosen: Tensor | None = None) -> Tensor:
    """The output of a LatentAttention by the keys and values that its heads have."""
    dim, _ = layer.widths
    query = layer.query(layer.compress_query(hidden)).unflatten(-1, (layer.heads, -1))[..., :dim]
    inputs = layer.project(hidden)
    key = torch.einsum("bkxc,ndc->bknd", inputs.latent, layer.absorbed_key)
    key = torch.cat((key, inputs.key_rope.expand(-1, -1, layer.heads, -1)), -1)
    value = torch.einsum("bkxc,ncd->bknd", inputs.latent, layer.absorbed_value)
    keep = causal(key.shape[1], key.shape[1]) if chosen is None else chosen.unsqueeze(1)
    rows = (x.transpose(1, 2) for x in (torch.cat((query, inputs.query_rope), -1), key, value))
    out, _ = by_definition(*rows, keep, layer.scale)
    return layer.out(out.transpose(1, 2).flatten(-2))


def chosen_keys(indices: Tensor, keys: int) -> Tensor:
    """(B, S, keys), True for the keys that are in `indices` (B, S, 1, K)."""
    rows = indices.squeeze(2).long()
    one_more = torch.zeros(*rows.shape[:2], keys + 1, dtype=torch.bool)
    return one_more.scatter(2, rows.where(rows >= 0, keys), True)[..., :keys]


def divergence(weights: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    """The mean over the tokens of KL(attention || indexer), over the chosen keys."""
    target = weights.detach().mean(2).clamp(min=1e-8)
    log_indexer = scores.masked_fill(~chosen, -torch.inf).log_softmax(-1)
    terms = target * (target.log() - log_indexer.clamp(min=-18.42))
    return terms.where(chosen, 0).sum(-1).mean()


def of_all_keys(
    query: Tensor, query_rope: Tensor, latent: Tensor, key_rope: Tensor, projections: tuple
) -> tuple[Tensor, Tensor]:
    """dsa_model.sparse_attention of texts that are shorter than the number of selected keys."""
    scores = indexer_scores(*projections)
    chosen = ~scores.isinf()
    out, weights = sparse_attention(query, query_rope, latent, key_rope, chosen, dsa_model.SCALE)
    return out, divergence(weights, scores, chosen)


def assert_best_keys(indices: Tensor, scores: Tensor, count: int, margin: float = 0.01) -> None:
    """Each row has min(count, visible) keys; none is worse than one left out by over `margin`."""
    chosen = chosen_keys(indices, scores.shape[-1])
    visible = ~scores.isinf()
    assert torch.equal(chosen.sum(-1), visible.sum(-1).clamp(max=count))
    assert not (chosen & ~visible).any()
    worst = scores.masked_fill(~chosen, torch.inf).amin(-1)
    best = scores.masked_fill(chosen, -torch.inf).amax(-1)
    spread = scores[visible].std()
    assert bool((best - worst <= margin * spread).all())


# After a few layers: the relative error of a tensor, and its error along the expected tensor, in
# which roundings cancel, but for the few of a vector.
ALLOWED = {torch.float32: (2e-5, 1e-5), torch.bfloat16: (0.06, 0.004)}
OF_A_VECTOR = 2


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype, name: str = "") -> None:
    x, y = actual.detach().double().flatten(), expected.detach().double().flatten()
    assert x.shape == y.shape, name
    assert y.norm() > 0, name
    error, scale = float((x - y).norm() / y.norm()), float(x @ y / (y @ y))
    allowed, bias = ALLOWED[dtype]
    bias *= OF_A_VECTOR if actual.dim() == 1 else 1
    assert (error <= allowed) & (abs(scale - 1) <= bias), (
        f"{name}: relative error {error:.2g}, scale {scale:.5f}"
    )


def assert_same_gradients(model: nn.Module, expected: nn.Module, dtype: torch.dtype) -> None:
    parameters = dict(model.named_parameters())
    for name, parameter in expected.named_parameters():
        assert_close(parameters[name].grad, parameter.grad, dtype, f"gradient of {name}")


@contextmanager
def compiling_anew() -> Iterator[None]:
    """Ignores graphs that other versions of the operators have left in torch's caches."""
    torch._dynamo.reset()
    with (
        torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield
