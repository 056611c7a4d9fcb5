"""attention_update, beside the properties that every operator's samples are tested for."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops
import pytest
import torch
from ascend_attn_ops import attention_update, flash_attention_score, log_sum_exp
from support.tolerance import TOLERANCES, assert_close

pytestmark = pytest.mark.usefixtures("no_limits")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_parts_of_the_keys_give_the_attention_over_all(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 3, s, 16, generator=generator, dtype=torch.float64).to(dtype)
        for s in (5, 40, 40)
    )

    def attend(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        part, softmax_max, softmax_sum = flash_attention_score(
            query, key[:, :, keys], value[:, :, keys], num_heads=3, layout="BNSD"
        )
        # Every row has its statistics eight times.
        return log_sum_exp(softmax_max, softmax_sum)[..., 0], part

    whole_lse, whole = attend(slice(None))
    parts = [attend(slice(*x)) for x in ((0, 7), (7, 8), (8, 40))]
    first = attention_update(*(list(x) for x in zip(*parts[:2], strict=True)))
    merged_again = attention_update([first[1], parts[2][0]], [first[0], parts[2][1]])
    at_once = attention_update(*zip(*parts, strict=True))
    for out, lse in (merged_again, at_once):
        assert_close("out", out, whole, TOLERANCES[dtype])
        assert_close("lse", lse, whole_lse, TOLERANCES[dtype])


def test_one_part_is_copied() -> None:
    lse, part = torch.randn(4), torch.randn(4, 8)
    out, lse_out = attention_update([lse], [part])
    assert torch.equal(out, part)
    assert torch.equal(lse_out, lse)
    assert out.data_ptr() != part.data_ptr()
    assert lse_out.data_ptr() != lse.data_ptr()


def test_nan_counts_as_arithmetic_has_it() -> None:
    """Unless no part has a key for the row: then nothing of the parts is read."""
    nan, inf = torch.nan, torch.inf
    lse = [torch.tensor([0, -inf, nan, -inf, -inf]), torch.tensor([-inf, 0, 0, nan, -inf])]
    local_out = [torch.tensor([[1.0], [nan], [1.0], [1.0], [nan]]), torch.ones(5, 1)]
    out, lse_out = attention_update(lse, local_out)
    expected = torch.tensor([[1.0], [nan], [nan], [nan], [0.0]])
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=0, atol=0)
    expected_lse = torch.tensor([0.0, 0.0, nan, nan, -inf])
    torch.testing.assert_close(lse_out, expected_lse, equal_nan=True, rtol=0, atol=0)


def test_a_row_without_keys_has_no_gradient() -> None:
    lse = [torch.full((2,), -torch.inf, requires_grad=True) for _ in range(3)]
    local_out = [torch.full((2, 8), torch.nan, requires_grad=True) for _ in lse]
    out, lse_out = attention_update(lse, local_out)
    for x in torch.autograd.grad(out.sum() + lse_out.sum(), [*lse, *local_out]):
        assert torch.equal(x, torch.zeros_like(x))


def test_none_in_a_list_is_refused() -> None:
    part = torch.ones(2, 8)
    with pytest.raises(RuntimeError, match=r"List\[Tensor\]"):
        torch.ops.ascend.attention_update([None], [part])
    with pytest.raises(TypeError, match=r"^ascend::attention_update: lse: expected .*got \[None\]"):
        ascend_attn_ops.attention_update([None], [part])


@pytest.mark.parametrize(
    ("device", "most"), [(("A2", "8.5"), 16), (("A3", "9.0"), 16), (("A2", "9.1"), 128)]
)
def test_most_parts_of_the_device(device: tuple[Any, Any], most: int) -> None:
    def update(parts: int) -> None:
        lse, out = torch.empty(8, device="meta"), torch.empty(8, 64, device="meta")
        torch.ops.ascend.attention_update([lse] * parts, [out.bfloat16()] * parts)

    with ascend_attn_ops.limits(*device):
        update(most)
        with pytest.raises(ValueError, match=rf"n \(parts\) to be 1\.\.{most} on"):
            update(most + 1)
