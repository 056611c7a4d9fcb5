"""Masks of dense attention: axes of 1 that the public function expands, and warnings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from support.attention import qkv
from support.tolerance import assert_same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.usefixtures("no_limits")

B, N, D = 2, 4, 16
score = ops.flash_attention_score


def test_masks_are_expanded_without_their_values() -> None:
    """A fake tensor has no values to read."""
    with FakeTensorMode() as fake:
        q, k, v = (fake.from_tensor(x) for x in qkv(6, 9))
        mask = fake.from_tensor(torch.zeros(B, 1, 1, 9, dtype=torch.bool))
        out, *_ = score(q, k, v, num_heads=N, layout="BNSD", atten_mask=mask)
        assert out.shape == q.shape


@pytest.mark.parametrize(
    ("dtype", "low"), [(torch.float16, -30000.0), (torch.bfloat16, -1e30)], ids=str
)
def test_padding_as_a_bias(dtype: torch.dtype, low: float) -> None:
    """A finite low score has the weight 0: results have the bits of the mask's."""
    q, k, v = (x.to(dtype) for x in qkv(6, 9))
    padding = torch.arange(9) >= torch.tensor([5, 8])[:, None]
    bias = torch.zeros(B, N, 1, 9, dtype=dtype).masked_fill(padding[:, None, None], low)
    options: dict[str, Any] = {"num_heads": N, "layout": "BNSD"}
    masked = score(q, k, v, atten_mask=padding[:, None, None], **options)
    assert_same_bits(score(q, k, v, pse_shift=bias, pse_type=0, **options), masked)


def pack(x: Tensor, lengths: list[int]) -> Tensor:
    """(B, N, S, D) in layout TND, without padding."""
    return torch.cat([y[:, :n].transpose(0, 1) for y, n in zip(x, lengths, strict=True)])


@pytest.mark.parametrize(
    "shape", [(B, 1, 1, 9), (1, 1, 1, 9), (1, N, 6, 9), (B, N, 1, 9), (1, N, 1, 9), (B, 1, 6, 1)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("mode", [0, 1])
def test_masks_of_packs_are_expanded(shape: tuple[int, ...], mode: int) -> None:
    """To the longest sequences, and to the number of sequences."""
    q, k, v = qkv(6, 9)
    queries, keys = [6, 4], [5, 9]
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    packed = pack(q, queries), pack(k, keys), pack(v, keys)
    options: dict[str, Any] = {
        "num_heads": N, "layout": "TND", "sparse_mode": mode, "scale_value": 0.3,
        "actual_seq_lengths_query": [6, 10], "actual_seq_lengths_key": [5, 14],
    }  # fmt: skip
    full = mask.expand(B, N, 6, 9).contiguous()
    expected = score(*packed, atten_mask=full, **options)
    actual = score(*packed, atten_mask=mask, **options)
    assert_same_bits(actual, expected)
    inputs = (*packed, expected[0], *expected[1:], expected[0])
    assert_same_bits(
        ops.flash_attention_score_grad(*inputs, atten_mask=mask, **options),
        ops.flash_attention_score_grad(*inputs, atten_mask=full, **options),
    )


# Warnings of masks that are hardly meant.

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
