"""The parts into which sparse_flash_attention divides the keys of a token show in no bit."""

from __future__ import annotations

import pytest
import torch
from fuzz.calls import threads
from samples import OPERATORS, Recipe

PARTED = [x for x in OPERATORS["sparse_flash_attention"].recipes if x.case.k * x.case.block > 512]

pytestmark = pytest.mark.usefixtures("no_limits")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("recipe", PARTED, ids=lambda x: x.id)
def test_any_number_of_threads(recipe: Recipe, dtype: torch.dtype) -> None:
    sample = recipe.make(dtype)
    with threads(1):
        expected = sample.call(torch.ops.ascend)
    for count in (2, 3, 7):
        with threads(count):
            assert all(map(torch.equal, sample.call(torch.ops.ascend), expected))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_token_alone_and_among_others(count: int) -> None:
    """Decoding one sequence, whose parts are shared among threads, and a batch of them."""
    batch, keys = 13, 1500
    query, cache = torch.randn(batch, 1, 4, 32), torch.randn(batch, keys, 1, 32)
    indices = torch.stack([torch.randperm(keys)[:1200] for _ in range(batch)])
    indices = indices.int().view(batch, 1, 1, 1200)
    with threads(count):
        together = torch.ops.ascend.sparse_flash_attention(
            query, cache, cache, indices, scale_value=0.2
        )
        for b in range(batch):
            alone = torch.ops.ascend.sparse_flash_attention(
                *(x[b : b + 1] for x in (query, cache, cache, indices)), scale_value=0.2
            )
            assert torch.equal(alone[0][0], together[0][b])
            for x, y in zip(alone[1:], together[1:], strict=True):
                assert torch.equal(x, y[b : b + 1])
