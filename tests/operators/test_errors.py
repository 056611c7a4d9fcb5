"""Every rule of every operator has a call that violates it and nothing else."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops
import pytest
import torch
from support.samples import OPERATORS, WRONG_CALLS, Operator, Sample, WrongCall, bytes_of
from support.turns import by_turns
from torch._subclasses.fake_tensor import FakeTensorMode


def row_id(row: WrongCall) -> str:
    return f"{row.operator.name}-{row.id}"


def good_id(row: WrongCall) -> str:
    return f"{row.operator.name}-{row.case.id}-{row.limits_of_good}"


def check_error(row: WrongCall, sample: Sample) -> None:
    errors = (TypeError, ValueError, RuntimeError)
    with ascend_attn_ops.limits(row.limits), pytest.raises(errors) as raised:
        sample.call(torch.ops.ascend)
    assert raised.type is row.exception, raised.value
    row.check_message(str(raised.value))


@pytest.mark.parametrize("row", WRONG_CALLS, ids=row_id)
def test_a_wrong_call_is_refused_before_anything_is_written(row: WrongCall) -> None:
    sample = row.wrong()
    before = {n: bytes_of(x).clone() for n, x in sample.tensors.items() if not x.is_meta}
    check_error(row, sample)
    for name, bytes_before in before.items():
        assert torch.equal(bytes_of(sample.tensors[name]), bytes_before), name


@by_turns(4)
@pytest.mark.parametrize("row", [row for row in WRONG_CALLS if row.on_meta], ids=row_id)
def test_a_wrong_call_is_refused_on_fake_tensors(row: WrongCall) -> None:
    sample = row.wrong()
    if row.exception is NotImplementedError:
        # Fake tensors replace this error by one of their own.
        check_error(row, sample.to("meta"))
        return
    with FakeTensorMode() as mode:
        check_error(row, sample.map(mode.from_tensor))


@pytest.mark.parametrize(
    "row", list({(r.operator, r.case, r.dtype, r.limits_of_good): r for r in WRONG_CALLS}.values()),
    ids=good_id,
)  # fmt: skip
def test_the_call_that_was_changed_is_good(row: WrongCall) -> None:
    """The unchanged call must be valid; otherwise its error would prove nothing."""
    with ascend_attn_ops.limits(row.limits_of_good):
        row.good().call(torch.ops.ascend)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda operator: operator.name)
@pytest.mark.usefixtures("no_limits")
def test_none_where_a_tensor_must_be(operator: Operator, device: str) -> None:
    sample = operator.small_sample().to(device).requires_grad(operator.differentiable)
    for name in (a.name for a in operator.overload._schema.arguments if str(a.type) == "Tensor"):
        expected = (
            rf"ascend::{operator.name}: {name}: expected a tensor, got None \[.*NULLPTR 161001\]"
        )
        with pytest.raises(ValueError, match=expected):
            sample.replace(**{name: None}).call(torch.ops.ascend)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("B\nS\x00D", r"'B\x0aS\x00D'"),
        ("x" * 300, f"'{'x' * 100}'..."),
        ("é" * 70, f"'{'é' * 50}'..."),
        ("é漢😀".encode(), "'é漢😀'"),
        (b"BSND\xff", r"'BSND\xff'"),
        (b"\xed\xa0\x80", r"'\xed\xa0\x80'"),  # a surrogate
        (b"\xe6\xbc", r"'\xe6\xbc'"),  # the beginning of a character
    ],
    ids=["lines", "long", "two bytes", "UTF-8", "no character", "surrogate", "cut"],
)
@pytest.mark.usefixtures("no_limits")
def test_text_of_the_caller_is_quoted_on_one_line(text: Any, shown: str) -> None:
    x = torch.ones(1, 2, 1, 8)
    with pytest.raises(ValueError, match="layout: expected one of") as raised:
        ascend_attn_ops.flash_attention_score(x, x, x, num_heads=1, layout=text)
    assert f"got {shown} [" in str(raised.value)
    if isinstance(text, bytes):
        return
    with pytest.raises(ValueError, match="cache_mode: expected one of") as raised:
        ascend_attn_ops.scatter_pa_kv_cache_(
            x[0], x, torch.tensor([0, 1]), x[0], x.clone(), cache_mode=text
        )
    assert f"got {shown} [" in str(raised.value)
    with pytest.raises(ValueError, match="product: expected None or one of") as raised:
        ascend_attn_ops.limits(text).__enter__()
    # CANN has no such function, and so no code for it.
    assert str(raised.value).endswith(f"got {shown}")


@pytest.mark.usefixtures("no_limits")
def test_tensors_without_one_shape_or_dense_memory() -> None:
    x = torch.ones(1, 2, 1, 8, requires_grad=True)
    nested = torch.nested.nested_tensor([torch.ones(2, 8)])
    indices = torch.zeros(1, 2, 1, 1, dtype=torch.int32)
    with pytest.raises(
        NotImplementedError, match="key: expected a tensor of one shape, got a nest"
    ):
        torch.ops.ascend.sparse_flash_attention(x, nested, x, indices, scale_value=1.0)
    parts = [torch.ones(2, 8)] * 2
    with pytest.raises(NotImplementedError, match=r"lse\[1\]: expected a dense tensor .*Sparse"):
        torch.ops.ascend.attention_update([torch.ones(2), torch.ones(2).to_sparse()], parts)
