"""The LightningIndexer module: shapes, dtypes and positions; the programs judge its selection."""

from __future__ import annotations

import pytest
import torch
from ascend_attn_ops import LightningIndexer, compress_keys
from ascend_attn_ops.nn.lightning_indexer import rotary_embedding
from torch import Tensor

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


# compress_keys: the weighted means of windows of tokens.


def inputs(tokens: int, features: int, ratio: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = (2, tokens, features), (2, tokens, features), (ratio, features)
    values, logits, bias = (
        torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes
    )
    return values, logits, bias


def one_by_one(values: Tensor, logits: Tensor, bias: Tensor, overlap: bool) -> Tensor:
    """(S, F) of one sequence as (S // r, D), from the definition."""
    ratio, size = len(bias), values.shape[-1] // (2 if overlap else 1)
    keys = []
    for w in range(len(values) // ratio):
        own = slice(w * ratio, (w + 1) * ratio)
        x, z = values[own, -size:], logits[own, -size:] + bias[:, -size:]
        if overlap and w > 0:
            before = slice((w - 1) * ratio, w * ratio)
            x = torch.cat([values[before, :size], x])
            z = torch.cat([logits[before, :size] + bias[:, :size], z])
        keys.append((x * z.softmax(0)).sum(0))
    return torch.stack(keys) if keys else values.new_zeros(0, size)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tokens", [0, 3, 4, 19])
def test_against_the_definition(tokens: int, overlap: bool) -> None:
    values, logits, bias = inputs(tokens, 6)
    keys = compress_keys(values, logits, bias, overlap=overlap)
    for batch in range(2):
        expected = one_by_one(values[batch], logits[batch], bias, overlap)
        # The weights are rounded to float32, as in transformers.
        torch.testing.assert_close(keys[batch], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("lengths", [(9,), (3, 9), (4, 0, 11, 1, 8), (2, 1)])
def test_packed_sequences_are_compressed_each_by_itself(
    lengths: tuple[int, ...], overlap: bool
) -> None:
    parts = [inputs(length, 6) for length in lengths]
    bias = parts[0][2]
    values, logits = (torch.cat([part[i][0] for part in parts]) for i in (0, 1))
    ends = torch.tensor(lengths).cumsum(0).tolist()
    keys = compress_keys(values, logits, bias, overlap=overlap, actual_seq_lengths=ends)
    alone = [compress_keys(x[:1], y[:1], bias, overlap=overlap)[0] for x, y, _ in parts]
    assert torch.equal(keys, torch.cat(alone))


def test_the_window_before_may_come_from_a_cache() -> None:
    values, logits, bias = inputs(16, 6)
    whole = compress_keys(values, logits, bias, overlap=True)
    previous = values[:, 4:8, :3], (logits[:, 4:8] + bias)[..., :3]
    rest = compress_keys(values[:, 8:], logits[:, 8:], bias, overlap=True, previous=previous)
    assert torch.equal(rest, whole[:, 2:])


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients(overlap: bool) -> None:
    leaves = [x.requires_grad_() for x in inputs(9, 4)]

    def compress(*tensors: Tensor) -> Tensor:
        return compress_keys(*tensors, overlap=overlap)

    # The softmax is in float32.
    assert torch.autograd.gradcheck(compress, leaves, eps=1e-2, atol=1e-3, rtol=1e-3)
