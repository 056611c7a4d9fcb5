"""attention_update, beside the properties that every operator's samples are tested for."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops
import pytest
import torch
from ascend_attn_ops import attention_update

pytestmark = pytest.mark.usefixtures("no_limits")


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
