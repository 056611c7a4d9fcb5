"""A process that forks after its threads have computed, as torch's DataLoader does."""

from __future__ import annotations

from collections.abc import Iterator

import ascend_attn_ops as ops
import pytest
import torch
from support.tolerance import assert_same_bits
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class Computed(Dataset[tuple[Tensor, ...]]):
    """Whose items are computed where they are asked for."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(index)
        query = torch.randn(1, 256, 8, 32, generator=generator)
        key = query[:, :, :1]
        weights = torch.rand(1, 256, 8, generator=generator)
        with ops.limits(None):
            indices, _ = ops.lightning_indexer(query, key, weights, sparse_count=64)
            attended = ops.sparse_flash_attention(query, key, key, indices, scale_value=0.2)
            dense = ops.flash_attention_score(query, key, key, num_heads=8, layout="BSND")
        return indices, *attended, *dense


@pytest.fixture
def several_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("several_threads")
def test_workers_of_a_data_loader() -> None:
    """They compute with one thread each, which torch sets."""
    items = Computed()
    expected = [items[index] for index in range(2)]
    loader = DataLoader(
        items, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    for actual, one in zip(loader, expected, strict=True):
        assert_same_bits(tuple(actual), one)
