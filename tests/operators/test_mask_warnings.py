"""Warnings of masks that are hardly meant, in the calls of dense attention."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

Q, K = torch.randn(1, 4, 5, 8), torch.randn(1, 4, 6, 8)
MASK = torch.ones(Q.shape[2], K.shape[2], dtype=torch.bool)
MASKS_ALL = "atten_mask: masks every key, as True masks"


@pytest.fixture(autouse=True)
def _every_warning() -> Iterator[None]:
    """Not only the first of a process."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


def dense(**changes: Any) -> Tensor:
    arguments: dict[str, Any] = {"key": K, "value": K, "num_heads": 4, "layout": "BNSD", **changes}
    return ops.flash_attention_score(Q, **arguments)[0]


def padded(**changes: Any) -> Tensor:
    """Lengths of a padded batch."""
    return dense(actual_seq_lengths_query=[1], **changes)


def prompt(**changes: Any) -> Tensor:
    arguments: dict[str, Any] = {"key": K, "value": K, "num_heads": 4, "layout": "BNSD", **changes}
    return ops.prompt_flash_attention(Q, **arguments)


@pytest.mark.parametrize("attend", [dense, padded, prompt])
def test_a_mask_of_all_keys_warns(attend: Callable[..., Tensor]) -> None:
    few = MASK.clone()
    few[0, -1] = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(atten_mask=~MASK, sparse_mode=1)
        attend(atten_mask=few, sparse_mode=1)
        with pytest.raises(UserWarning, match="masks every key"):
            attend(atten_mask=MASK, sparse_mode=1)
    with pytest.warns(UserWarning, match=MASKS_ALL) as seen:
        assert not attend(atten_mask=MASK, sparse_mode=1).any()
    assert len(seen) == 1


@pytest.mark.parametrize("attend", [dense, prompt])
def test_a_triangle_of_the_other_polarity_warns(attend: Callable[..., Tensor]) -> None:
    keep = torch.ones(Q.shape[2], Q.shape[2], dtype=torch.bool).tril()
    options = {"key": Q, "value": Q, "sparse_mode": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(atten_mask=~keep, **options)
        attend(atten_mask=keep ^ torch.eye(len(keep), dtype=torch.bool), **options)
    with pytest.warns(UserWarning, match="masks the key of each query and keeps all that come"):
        attend(atten_mask=keep, **options)


@pytest.mark.parametrize("attend", [dense, prompt])
def test_a_sparse_mask_of_all_keys_is_not_read(attend: Callable[..., Tensor]) -> None:
    with pytest.raises(NotImplementedError, match=r"atten_mask: .* of layout Sparse"):
        attend(atten_mask=MASK.to_sparse(), sparse_mode=1)


def test_an_expanded_mask_is_not_read_as_often_as_it_is_repeated() -> None:
    one = torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="atten_mask"):  # reading 2^40 elements takes minutes
        dense(atten_mask=one.expand(2**20, 2**20), sparse_mode=1)
    overlapping = torch.ones(2**22, dtype=torch.bool).as_strided((2**20, 2**20), (1, 1))
    with pytest.raises(ValueError, match="atten_mask"):
        dense(atten_mask=overlapping, sparse_mode=1)
    with pytest.warns(UserWarning, match=MASKS_ALL):
        assert not dense(atten_mask=one.expand(MASK.shape), sparse_mode=1).any()


@pytest.mark.parametrize("stride", [0, 1])
def test_a_larger_mask_is_not_read_as_often_as_its_rows_are_repeated(stride: int) -> None:
    elements = torch.ones(2**20, dtype=torch.bool)
    larger = elements.as_strided((2**19, 2**19), (stride, 1))  # 2^38 elements take minutes
    with pytest.warns(UserWarning, match=MASKS_ALL):
        assert not prompt(atten_mask=larger, sparse_mode=1).any()
