"""Calls that an operator must refuse: one form for the tables of all operators."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from ascend_attn_ops.check.samples.masks import compressed_mask
from ascend_attn_ops.check.samples.record import Operator
from ascend_attn_ops.check.samples.sample import Sample
from torch import Tensor

Change = Callable[[Sample], Sample]
Product = Literal["A2", "A3", "950", "310P"]


@dataclass(frozen=True)
class WrongCall:
    """A good call, what is changed in it, and the error that must name operator and argument."""

    id: str
    operator: Operator
    case: Any  # of the good call
    # Arguments by name, or a function. None: the limits alone make the call wrong.
    change: Change | dict[str, Any] | None
    argument: str  # regular expression, as `expected` and `code`
    exception: type[Exception] = ValueError
    expected: str = ""  # somewhere in the message
    code: str = r"\d{6}"
    limits: Product | None = None
    # False where the rule is about values or memory, which fake tensors do not have, or about
    # devices, which torch compares there by itself.
    on_meta: bool = True
    dtype: torch.dtype = torch.bfloat16

    def good(self) -> Sample:
        return self.operator.make(self.case, self.dtype)

    @property
    def limits_of_good(self) -> Product | None:
        """A call that is wrong within the limits alone is good without them."""
        return self.limits if self.change is not None else None

    def wrong(self) -> Sample:
        good = self.good()
        if isinstance(self.change, dict):
            return good.given(**self.change)
        return self.change(good) if self.change else good

    def check_message(self, message: str) -> None:
        """One line: operator, argument, what was expected, what came, and aclnn's status."""
        form = (
            rf"ascend::{self.operator.name}: ({self.argument}): "
            rf"expected .+, got .+ \[ACLNN_ERR_[A-Z_]+ {self.code}\]"
        )
        assert re.fullmatch(form, message), message
        assert re.search(self.expected, message), message


def wrong_inference(
    operator: Operator,
    case: Any,
    change: Change | dict[str, Any],
    argument: str,
    expected: str,
    exception: type[Exception] = ValueError,
    *,
    id: str = "",
    on_meta: bool = True,
) -> WrongCall:
    """A wrong call of an operator for inference; `expected` is a part of its name."""
    id = id or ("-".join(change) if isinstance(change, dict) else argument)
    return WrongCall(
        f"{case.id}-{id}-{expected}", operator, case, change, argument, exception, expected,
        code=r"16100\d", on_meta=on_meta,
    )  # fmt: skip


def put(name: str, function: Callable[[Any], object]) -> Change:
    """Another value of an argument, or of a tensor in a list, made of the good one."""
    return lambda sample: sample.replace(
        **{name: function({**sample.arguments, **sample.tensors}[name])}
    )


def statistics_rules(operator: Operator, case: Any) -> Iterator[WrongCall]:
    """Yields statistics that no softmax has, in the first row, which every call reads."""

    def exchanged(sample: Sample) -> Sample:
        maximum, total = sample.inputs["softmax_max"], sample.inputs["softmax_sum"]
        return sample.replace(softmax_max=total, softmax_sum=maximum)

    def first(value: float) -> Callable[[Tensor], Tensor]:
        def change(x: Tensor) -> Tensor:
            x = x.clone()
            x.view(-1)[0] = value
            return x

        return change

    sums = "sums of exp.* at least 1.*; softmax_max comes before softmax_sum"
    rules: list[tuple[str, Change, str, str]] = [
        ("exchanged", exchanged, "softmax_sum", sums),
        *(
            (f"sum {x}", put("softmax_sum", first(x)), "softmax_sum", sums)
            for x in (-1.0, 0.5, torch.inf, -torch.inf)
        ),
        *(
            (f"maximum {x}", put("softmax_max", first(x)), "softmax_max", "finite maxima")
            for x in (torch.inf, -torch.inf)
        ),
    ]
    for id, change, argument, expected in rules:
        yield WrongCall(
            f"statistics-{id}", operator, case, change, argument, expected=expected, on_meta=False
        )


def inference_mask_rules(
    wrong: Callable[..., WrongCall], plain: Any, masked: Any, band: Any
) -> Iterator[WrongCall]:
    """Yields wrong masks of an operator for inference.

    wrong: makes a WrongCall of a case, a change, the argument and what is expected. The cases have
    two batches of 6 queries and 9 keys: without a mask, with a full one, and in sparse_mode 4.
    """
    yield wrong(plain, {"sparse_mode": 5}, "sparse_mode", "expected 0, 1, 2 .*, 3 .* or 4")
    yield wrong(plain, {"sparse_mode": -1}, "sparse_mode", "got -1")
    yield wrong(plain, {"sparse_mode": 1}, "atten_mask", "full mask .* None.*161001")
    for mode in (2, 3, 4):
        expected = "compressed mask .* None.*161001"
        yield wrong(plain, {"sparse_mode": mode}, "atten_mask", expected, id=f"mode{mode}")
    number = {"atten_mask": torch.zeros(6, 9)}
    yield wrong(masked, number, "atten_mask", "bool, int8 or uint8", TypeError)
    for mask, expected in (
        (bools(6, 8), "or with more rows"),
        (bools(5, 9), "or with more rows"),
        (bools(9), r"expected shape \("),
        (bools(3, 6, 9), r"\(1, Sq, Skv\)"),
        (bools(3, 1, 6, 9), r"\(B, 1, Sq, Skv\)"),
        (bools(2, 2, 6, 9), r"\(1, 1, Sq, Skv\)"),
        (bools(1, 1, 1, 6, 9), r"\(Sq, Skv\)"),
    ):
        shape = "x".join(map(str, mask.shape))
        yield wrong(masked, {"atten_mask": mask}, "atten_mask", expected, id=shape)
    compressed = compressed_mask(3, torch.bool).expand(2, -1, -1)
    yield wrong(band, {"atten_mask": bools(6, 9)}, "atten_mask", r"\(2048, 2048\)")
    yield wrong(band, {"atten_mask": compressed}, "atten_mask", "1, 2048, 2048")
    for case in (masked, band):
        for pre, following, argument, expected in (
            (-4, -4, "pre_tokens", "not both negative"),
            (-1, -1, "pre_tokens", "not both negative"),
            (2, -3, "next_tokens", "keeps keys"),
            (-3, 2, "pre_tokens", "keeps keys"),
        ):
            tokens = {"pre_tokens": pre, "next_tokens": following}
            yield wrong(case, tokens, argument, expected, id=f"{pre} and {following}")


def elsewhere(x: Tensor) -> Tensor:
    """On another device."""
    return x.to("meta")


def both(*changes: Change) -> Change:
    def apply(sample: Sample) -> Sample:
        for change in changes:
            sample = change(sample)
        return sample

    return apply


def longer(axis: int) -> Callable[[Tensor], Tensor]:
    """One more along an axis."""
    return lambda x: torch.cat((x, x.narrow(axis, x.shape[axis] - 1, 1)), axis).contiguous()


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


def bools(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)
