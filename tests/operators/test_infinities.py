"""An infinite element of one token changes no result that does not depend on it."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops
import pytest
import torch
from support.samples import OPERATORS, Sample
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

Outputs = tuple[Tensor, ...]

DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def assert_as_reference(operator: str, actual: Outputs, *arguments: Tensor, **options: Any) -> None:
    """A NaN where the reference has one, and nowhere else."""
    schema = OPERATORS[operator].overload._schema.arguments
    names = [x.name for x in schema if not x.kwarg_only]
    sample = Sample(operator, "", dict(zip(names, arguments, strict=True)), options)
    OPERATORS[operator].assert_matches_reference(sample, actual)


def tokens(heads: int, keys: int, dtype: torch.dtype, infinite: slice) -> tuple[Tensor, ...]:
    """A query whose product with the infinite keys is -inf, keys and values."""
    query = torch.zeros(1, 2, heads, 4, dtype=dtype)
    query[..., 0] = 1
    key, value = torch.randn(2, 1, keys, 1, 4, dtype=dtype)
    key[:, infinite, :, 0] = -torch.inf
    return query, key, value


def every_key(keys: int) -> Tensor:
    return torch.arange(keys, dtype=torch.int32).expand(1, 2, 1, keys).contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("infinite", [1, 127, 128, 129, 256])
def test_tiles_whose_scores_are_minus_infinity(infinite: int, dtype: torch.dtype) -> None:
    keys = infinite + 8
    query, key, value = tokens(2, keys, dtype, slice(infinite))
    options = {"scale_value": 1.0, "sparse_mode": 0}
    arguments = query, key, value, every_key(keys)
    actual = torch.ops.ascend.sparse_flash_attention(*arguments, **options)
    assert_as_reference("sparse_flash_attention", actual, *arguments, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 2, 3, 5])
def test_gradients_beside_an_infinite_key(heads: int, dtype: torch.dtype) -> None:
    """Heads are padded to whole tiles; those of padding have no part."""
    query, key, value = tokens(heads, 6, dtype, slice(1, 2))
    options = {"scale_value": 1.0, "sparse_mode": 0}
    main = query, key, value, every_key(6)
    out, *statistics = torch.ops.ascend.sparse_flash_attention(*main, **options)
    arguments = *main, torch.randn_like(out), out, *statistics
    actual = torch.ops.ascend.sparse_flash_attention_grad(*arguments, **options)
    assert_as_reference("sparse_flash_attention_grad", actual, *arguments, **options)
    assert actual[1].isfinite().all()
    assert actual[2].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 3, 16])
def test_loss_beside_an_infinite_key(heads: int, dtype: torch.dtype) -> None:
    query, key, _ = tokens(heads, 6, dtype, slice(1, 2))
    query_index, key_index, _ = tokens(heads, 6, dtype, slice(2, 3))
    weights = torch.rand(1, 2, heads, dtype=dtype)
    options = {"scale_value": 1.0, "sparse_mode": 0}
    indices = every_key(6)
    _, *statistics = torch.ops.ascend.sparse_flash_attention(query, key, key, indices, **options)
    arguments = query, key, query_index, key_index, weights, indices, *statistics
    options = {"scale_value": 1.0, "layout": "BSND", "sparse_mode": 3}
    actual = torch.ops.ascend.sparse_lightning_indexer_grad_kl_loss(*arguments, **options)
    assert_as_reference("sparse_lightning_indexer_grad_kl_loss", actual, *arguments, **options)
    assert actual[3].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [1, 2, 17])
def test_dense_gradients_of_an_infinite_key_that_no_query_sees(
    queries: int, dtype: torch.dtype
) -> None:
    """Queries are padded to whole tiles; the padding must not change a result."""
    query, key, value = (torch.randn(1, 1, n, 4, dtype=dtype) for n in (queries, 32, 32))
    key[0, 0, queries + 2, 0] = torch.inf
    options = {"num_heads": 1, "layout": "BNSD", "scale_value": 0.5, "sparse_mode": 2}
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out, *_ = ascend_attn_ops.flash_attention_score(*leaves, **options)
    _, d_key, d_value = torch.autograd.grad(out.sum(), leaves)
    assert out.isfinite().all()
    for gradient in (d_key, d_value):
        assert gradient[:, :, :queries].isfinite().all()
        assert (gradient[:, :, queries:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dense_gradients_of_keys_that_a_mask_hides_from_a_nan(dtype: torch.dtype) -> None:
    """The maximum and the sum of such a row are NaN."""
    query, key, value = (torch.randn(1, 1, n, 4, dtype=dtype) for n in (3, 20, 20))
    query[0, 0, 1, 0] = torch.nan
    mask = torch.rand(3, 20) < 0.3
    mask[1, ::2] = True
    options = {"num_heads": 1, "layout": "BNSD", "scale_value": 0.5, "sparse_mode": 1}
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out, *_ = ascend_attn_ops.flash_attention_score(*leaves, atten_mask=mask, **options)
    _, d_key, d_value = torch.autograd.grad(out.sum(), leaves)
    assert d_value[0, 0, mask[1]].isfinite().all()
    assert d_value[0, 0, ~mask[1]].isnan().all()
    assert d_key.isnan().any()
