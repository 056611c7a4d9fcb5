"""The LightningIndexer module: shapes, dtypes, positions, and what it selects."""

from __future__ import annotations

import pytest
import torch
from ascend_attn_ops import LightningIndexer
from ascend_attn_ops.modules import rotary_embedding

pytestmark = pytest.mark.usefixtures("no_limits")

HIDDEN, HEADS, DIM = 24, 3, 16


def make(rope_dim: int = 8, dtype: torch.dtype = torch.float32) -> LightningIndexer:
    torch.manual_seed(0)
    return LightningIndexer(HIDDEN, num_heads=HEADS, head_dim=DIM, rope_dim=rope_dim, dtype=dtype)


@pytest.mark.parametrize("rope_dim", [0, 8, DIM])
@pytest.mark.parametrize("shape", [(2, 7), (11,)], ids=["BSND", "TND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projections_fit_the_operators(
    shape: tuple[int, ...], rope_dim: int, dtype: torch.dtype
) -> None:
    query, key, weights = make(rope_dim, dtype)(torch.randn(*shape, HIDDEN, dtype=dtype))
    assert query.shape == (*shape, HEADS, DIM)
    assert key.shape == (*shape, 1, DIM)
    assert weights.shape == (*shape, HEADS)
    assert query.dtype == key.dtype == weights.dtype == dtype


def test_weights_include_the_scale() -> None:
    """1 / sqrt(Didx) of the products, and 1 / sqrt(Nidx) of their sum over the heads."""
    indexer, hidden = make(), torch.randn(2, 7, HIDDEN)
    expected = hidden @ indexer.weights.weight.T / (HEADS * DIM) ** 0.5
    torch.testing.assert_close(indexer(hidden).weights, expected)


def test_autocast_sets_every_dtype() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        projections = make()(torch.randn(1, 5, HIDDEN))
    assert {x.dtype for x in projections} == {torch.bfloat16}


def test_only_differences_of_positions_matter() -> None:
    x, y = torch.randn(2, 1, 9, 1, DIM, dtype=torch.float64)
    positions = torch.arange(9)

    def products(shift: int) -> torch.Tensor:
        left, right = (rotary_embedding(z, positions + shift).squeeze(2) for z in (x, y))
        return left @ right.transpose(1, 2)

    torch.testing.assert_close(products(0), products(50), rtol=1e-4, atol=1e-4)
    plain = x.squeeze(2) @ y.squeeze(2).transpose(1, 2)
    assert not torch.allclose(products(0), plain, rtol=1e-2, atol=1e-2)
    # A token meets itself without rotation.
    torch.testing.assert_close(
        products(0).diagonal(dim1=1, dim2=2), plain.diagonal(dim1=1, dim2=2), rtol=1e-5, atol=1e-5
    )


def test_selects_the_best_scores_causally() -> None:
    indexer, hidden = make(), torch.randn(2, 10, HIDDEN)
    projections = indexer(hidden)
    indices = indexer.select(projections, 4)
    assert indices.dtype == torch.int32
    assert not indices.requires_grad
    query, key, weights = projections
    products = torch.einsum("bqhd,bkd->bqkh", query, key.squeeze(2)).relu()
    scores = torch.einsum("bqkh,bqh->bqk", products, weights)
    causal = torch.ones(10, 10, dtype=torch.bool).tril()
    scores = scores.masked_fill(~causal, -torch.inf)
    # Scores, not indices: several keys may share the score 0 that relu leaves.
    chosen = indices.squeeze(2).long()
    found = scores.gather(-1, chosen.clamp(min=0)).masked_fill(chosen < 0, -torch.inf)
    torch.testing.assert_close(found, scores.topk(4).values)
    assert all(len(set(row)) == 4 for row in chosen[:, 3:].flatten(0, 1).tolist())
