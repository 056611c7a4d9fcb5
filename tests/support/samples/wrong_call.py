"""Calls that an operator must refuse: one form for the tables of all operators."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from typing import Any, Literal

import torch
from ascend_attn_check.samples.masks import compressed_mask
from ascend_attn_check.samples.record import Operator
from ascend_attn_ops.reference.call import LENGTHS_ON_HOST, Sample, lengths
from torch import Tensor

Change = Callable[[Sample], Sample]
Product = Literal["A2", "A3", "950", "310P"]

LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")
COMPRESSED = compressed_mask(3, torch.bool)


@dataclass(frozen=True)
class WrongCall:
    """A good call, what is changed in it, and the error that must name operator and argument."""

    id: str
    operator: Operator
    case: Any  # of the good call
    # Arguments by name, or functions of the good ones; or a function of the sample. None: only the
    # limits make the call wrong.
    change: Change | dict[str, Any] | None
    argument: str  # regular expression, as `expected` and `code`
    exception: type[Exception] = ValueError
    expected: str = ""  # somewhere in the message
    code: str = r"16100\d"
    limits: Product | None = None
    # False where the rule is about values, lengths or memory, which fake tensors do not have, or
    # about devices, which torch compares there by itself.
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
        if not isinstance(self.change, dict):
            return self.change(good) if self.change else good
        known = {**good.arguments, **good.tensors}
        change = {name: x(known[name]) if callable(x) else x for name, x in self.change.items()}
        for name in LENGTHS_ON_HOST:
            if isinstance(change.get(name), list):
                change[name] = lengths(change[name])
        return good.replace(**change) if change.keys() <= known.keys() else good.given(**change)

    def check_message(self, message: str) -> None:
        """One line: operator, argument, what was expected, what came, and aclnn's status."""
        form = (
            rf"ascend::{self.operator.name}: ({self.argument}): "
            rf"expected .+, got .+ \[ACLNN_ERR_[A-Z_]+ {self.code}\]"
        )
        assert re.fullmatch(form, message), message
        assert re.search(self.expected, message), message
        assert f"Ascend {self.limits or ''}" in message or self.limits is None, message


def wrong_call(
    operator: Operator, case: Any, expected: str = "", exception: type[Exception] = ValueError, *,
    id: object = "", change: Change | None = None, **arguments: Any,
) -> WrongCall:  # fmt: skip
    """Makes a wrong call whose error names the first of the arguments, or what `expected` does.

    expected: a pattern in the message, or `argument: pattern`. The arguments that are fields of
    WrongCall are these, and all others are changed in the good call.
    """
    options = {name: arguments.pop(name) for name in OPTIONS if name in arguments}
    named = re.match(r"((?:[\w|*+\\[\]]|, )+): ", expected)
    argument = named[1] if named else re.escape(next(iter(arguments)))
    expected = expected[named.end() :] if named else expected
    changed = [f"{name} {getattr(x, '__name__', '')}" for name, x in arguments.items()]
    return WrongCall(
        f"{options.get('limits', case.id)}-{'-'.join(changed) or argument}-{id}-{expected}",
        operator, case, change or arguments or None, argument, exception, expected,
        **{"on_meta": elsewhere not in arguments.values(), **options},
    )  # fmt: skip


OPTIONS = ("code", "limits", "on_meta", "dtype")


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

    wrong = partial(wrong_call, operator, case, on_meta=False)
    sums = "softmax_sum: sums of exp.* at least 1.*; softmax_max comes before softmax_sum"
    yield wrong(sums, id="exchanged", change=exchanged)
    for x in (-1.0, 0.5, torch.inf, -torch.inf):
        yield wrong(sums, id=x, softmax_sum=first(x))
    for x in (torch.inf, -torch.inf):
        yield wrong("finite maxima", id=x, softmax_max=first(x))


def inference_rules(
    wrong: Callable[..., WrongCall], plain: Any, three: Any, masked: Any, band: Any
) -> Iterator[WrongCall]:
    """Yields the wrong calls that operators for inference share.

    wrong: makes a WrongCall of a case, what is expected and the changed arguments. The cases have
    two batches of 6 queries of 4 heads and 9 keys of 2 heads: plain; three batches of these with
    lengths; with a full mask; and in sparse_mode 4.
    """
    for scale in (math.nan, math.inf, -math.inf, 1e39):
        expected = f"finite number of .*, got {re.escape(f'{scale:g}')}"
        yield wrong(plain, expected, scale_value=scale)
    merged = replace(plain, layout="BSH")
    query, key = LENGTHS
    yield from (
        # Layouts, dtypes, heads, sizes.
        wrong(plain, "rank 4", query=normal(2, 6, 32)),
        wrong(merged, "rank 3", key=normal(2, 9, 2, 8)),
        wrong(plain, "float16, bfloat16", TypeError, query=torch.ones(2, 4, 6, 8).int()),
        wrong(plain, "bfloat16", TypeError, key=normal(2, 2, 9, 8).half()),
        wrong(plain, "positive", num_heads=0),
        wrong(plain, "or 0", num_key_value_heads=-1),
        wrong(plain, "divisor of num_heads", num_key_value_heads=3),
        wrong(plain, "query: num_heads = 2 on axis 1", num_heads=2),
        wrong(plain, "key: num_key_value_heads = 4", num_key_value_heads=4),
        wrong(plain, "key: num_key_value_heads = 4", num_key_value_heads=0),
        wrong(merged, "multiple of num_heads = 4", query=normal(2, 6, 33)),
        wrong(plain, "head size of at least 1", query=normal(2, 4, 6, 0)),
        # Lengths.
        wrong(three, "one per batch, 3, got 2", **{query: [6, 2]}),
        wrong(three, "one per batch, 3, got 2", **{key: [6, 2]}),
        wrong(three, r"0\.\.S = 6, got 7", on_meta=False, **{query: [6, 2, 7]}),
        wrong(three, r"0\.\.S = 9, got -1", on_meta=False, **{key: [-1]}),
        # Masks and bands.
        wrong(plain, "expected 0, 1, 2 .*, 3 .* or 4", sparse_mode=5),
        wrong(plain, "got -1", sparse_mode=-1),
        wrong(plain, "atten_mask: full mask .* None.*161001", sparse_mode=1),
        wrong(masked, "bool, int8 or uint8", TypeError, atten_mask=torch.zeros(6, 9)),
        wrong(masked, "or with more rows", atten_mask=bools(6, 8)),
        wrong(masked, "or with more rows", atten_mask=bools(5, 9)),
        wrong(masked, r"expected shape \(", atten_mask=bools(9)),
        wrong(masked, r"\(1, Sq, Skv\)", atten_mask=bools(3, 6, 9)),
        wrong(masked, r"\(B, 1, Sq, Skv\)", atten_mask=bools(3, 1, 6, 9)),
        wrong(masked, r"\(1, 1, Sq, Skv\)", atten_mask=bools(2, 2, 6, 9)),
        wrong(masked, r"\(Sq, Skv\)", atten_mask=bools(1, 1, 1, 6, 9)),
        wrong(band, r"\(2048, 2048\)", atten_mask=bools(6, 9)),
        wrong(band, "1, 2048, 2048", atten_mask=COMPRESSED.expand(2, -1, -1)),
    )
    for case in (masked, band):
        for expected, pre, following in (
            ("not both negative", -4, -4), ("not both negative", -1, -1),
            ("next_tokens: keeps keys", 2, -3), ("keeps keys", -3, 2),
        ):  # fmt: skip
            yield wrong(case, expected, pre_tokens=pre, next_tokens=following)
    for id, mask in (
        ("inverted", COMPRESSED.logical_not()),
        ("transposed", COMPRESSED.T.contiguous()),
        ("zeros", torch.zeros_like(COMPRESSED)),
    ):
        expected = r"got other values; True \(1\) masks"
        yield wrong(band, expected, id=id, atten_mask=mask, on_meta=False)


def device_rules(
    wrong: Callable[..., WrongCall], case: Any, names: Sequence[str]
) -> Iterator[WrongCall]:
    """Yields calls with one tensor on another device than the query."""
    for name in names:
        yield wrong(case, r"expected device cpu \(query's\), got meta", **{name: elsewhere})


def gradient_rules(
    wrong: Callable[..., WrongCall], cases: Iterable[tuple[Any, str]]
) -> Iterator[WrongCall]:
    """Yields calls that would need gradients, which flash_attention_score has."""
    for case, name in cases:
        leaf = methodcaller("requires_grad", (name,))
        yield wrong(case, f"{name}: flash_attention_score", NotImplementedError, change=leaf)


def elsewhere(x: Tensor) -> Tensor:
    """On another device."""
    return x.to("meta")


def deeper(x: Tensor) -> Tensor:
    """With one axis more."""
    return x[None]


def flatter(x: Tensor) -> Tensor:
    """With one axis less."""
    return x[0]


def longer(axis: int) -> Callable[[Tensor], Tensor]:
    """One more along an axis."""
    return lambda x: torch.cat((x, x.narrow(axis, x.shape[axis] - 1, 1)), axis).contiguous()


def filled(value: int) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.full_like(x, value)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


def bools(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)
