"""Every rule of the sparse operators has a call that violates it and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import ascend_attn_ops
import pytest
import torch
from samples import (
    OPERATORS,
    Sample,
    lightning_indexer,
    sparse_flash_attention,
    sparse_lightning_indexer_grad_kl_loss,
)
from samples.sparse import SparseCase
from torch import Tensor

KL_LOSS = "sparse_lightning_indexer_grad_kl_loss"
LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")
BUILD = {
    "lightning_indexer": lightning_indexer.build,
    "lightning_indexer_grad": lightning_indexer.build_grad,
    "sparse_flash_attention": sparse_flash_attention.build,
    "sparse_flash_attention_grad": sparse_flash_attention.build_grad,
    KL_LOSS: sparse_lightning_indexer_grad_kl_loss.build,
}
SMALL = {
    "BSND": SparseCase(rope=8, heads=8, index_heads=8),
    "TND": SparseCase(layout="TND", lengths=((3, 2, 4), (5, 3, 4)), tail=(1, 2), rope=8),
    "BSND with lengths": SparseCase(lengths=((5, 3), (7, 4)), rope=8),
    "blocks of 8": SparseCase(s=(20, 20), block=8, k=2, mode=0),
}
# Within the device's limits.
ATTENTION = {"heads": 8, "d": 512, "rope": 64, "k": 1024, "index_heads": 8, "index_d": 128}
DEVICE = {
    "lightning_indexer": SparseCase(heads=8, d=128, k=1024),
    "lightning_indexer_grad": SparseCase(heads=8, d=128, k=1024),
    "sparse_flash_attention": SparseCase(**ATTENTION),
    "sparse_flash_attention_grad": SparseCase(**ATTENTION),
    KL_LOSS: SparseCase(**ATTENTION),
}

Change = Callable[[Sample], Sample]


@dataclass(frozen=True)
class Bad:
    """A good call, what is changed in it, and the error that must name operator and argument."""

    id: str
    operator: str
    case: str | SparseCase  # a name in SMALL, without limits; or sizes within the limits
    change: Change
    exception: type[Exception]
    argument: str  # regular expression
    product: str = "A2"
    # False where the rule is about values, which fake tensors do not have.
    on_meta: bool = True

    @property
    def limited(self) -> bool:
        return isinstance(self.case, SparseCase)

    def sample(self) -> Sample:
        case = SMALL[self.case] if isinstance(self.case, str) else self.case
        return self.change(good_sample(self.operator, case).clone())


@cache
def good_sample(operator: str, case: SparseCase) -> Sample:
    return BUILD[operator](case, torch.bfloat16)


def put(name: str, function: Callable[[Tensor], object]) -> Change:
    return lambda sample: sample.replace(**{name: function(sample.arguments[name])})


def option(**changes: object) -> Change:
    return lambda sample: sample.replace(**changes)


def longer(axis: int) -> Callable[[Tensor], Tensor]:
    """One more along an axis."""
    return lambda x: torch.cat((x, x.narrow(axis, x.shape[axis] - 1, 1)), axis)


def edited(values: list[int]) -> Callable[[object], object]:
    """Lengths of these values, in a tensor or a list as the operator takes them."""
    return lambda x: torch.tensor(values, dtype=x.dtype) if isinstance(x, Tensor) else values


def first_index(value: int) -> Callable[[Tensor], Tensor]:
    """In the first slot of the last query of the first batch, which every mode lets see a key."""

    def change(indices: Tensor) -> Tensor:
        row = indices[0, -1] if indices.dim() == 4 else indices[2]
        row[0, 0] = value
        return indices

    return change


# An extent that several arguments share belongs to the first; this is who is found to disagree.
NAMED = {
    ("query_index", -2): "weights",
    ("query_index", -1): "key_index",
    ("query_rope", -1): "key_rope",
    ("sparse_indices", -1): "d_values",
}


def tensor_rows(operator: str, layout: str) -> Iterator[Bad]:
    """Rank, dtype, device and every extent of every tensor."""
    good = good_sample(operator, SMALL[layout])
    for name, x in good.tensors.items():

        def bad(
            rule: str,
            change: Callable[[Tensor], object],
            exception: type[Exception],
            argument: str = name,
            name: str = name,
        ) -> Bad:
            return Bad(
                f"{layout}-{name}-{rule}", operator, layout, put(name, change), exception, argument
            )

        yield bad("rank too high", lambda x: x[None], ValueError)
        yield bad("rank too low", lambda x: x[0], ValueError)
        if x.is_floating_point():
            yield bad("integer", Tensor.int, TypeError)
        else:
            yield bad("int64", Tensor.long, TypeError)
            yield bad("float", Tensor.float, TypeError)
        if name != "query":
            yield bad("on another device", lambda x: x.to("meta"), ValueError)
            if x.is_floating_point():
                yield bad("float16", Tensor.half, TypeError)
                yield bad("float64", Tensor.double, TypeError)
        for axis in range(-x.dim(), 0):
            if name == "query" or name in LENGTHS:
                argument = r"\w+"
            else:
                argument = NAMED.get((name, axis), name)
            # Nothing else has the extent of the keys, or of the selection.
            keys = name == "key" and axis == -3
            if keys and operator.startswith("lightning_indexer"):
                continue
            if keys:
                argument = r"\w+"
            if argument not in good.arguments and argument != r"\w+":
                continue
            yield bad(f"axis {axis} too long", longer(axis), ValueError, argument)


def option_rows(operator: str) -> Iterator[Bad]:
    def bad(rule: str, change: Change, argument: str, case: str = "BSND") -> Bad:
        return Bad(rule, operator, case, change, ValueError, argument)

    for layout in ("BNSD", "BSH", "bsnd", ""):
        yield bad(f"layout {layout!r}", option(layout=layout), "layout")
    for mode in (-1, 1, 2, 4, 8, *([0] if operator == KL_LOSS else [])):
        yield bad(f"sparse_mode {mode}", option(sparse_mode=mode), "sparse_mode")
    arguments = good_sample(operator, SMALL["BSND"]).arguments
    for name in ("sparse_count", "sparse_block_size"):
        if name in arguments:
            yield bad(f"{name} 0", option(**{name: 0}), name)
            yield bad(f"{name} negative", option(**{name: -1}), name)
    if "query_rope" in arguments:
        yield bad("query_rope alone", option(key_rope=None), "key_rope")
        yield bad("key_rope alone", option(query_rope=None), "query_rope")


def length_rows(operator: str) -> Iterator[Bad]:
    def bad(rule: str, case: str, change: Change, argument: str, *, on_meta: bool = False) -> Bad:
        id = f"{rule}-{argument}"
        return Bad(id, operator, case, change, ValueError, argument, on_meta=on_meta)

    good = good_sample(operator, SMALL["TND"])
    on_host = operator == KL_LOSS
    for side, name in enumerate(LENGTHS):
        given = SMALL["TND"].length_list(side)
        tokens = SMALL["TND"].tokens(side)[0]
        for rule, values in {
            "decreasing": [given[1], given[0], given[2]],
            "beyond T": [*given[:2], tokens + 1],
            "negative": [-1, *given[1:]],
        }.items():
            yield bad(f"TND-{rule}", "TND", put(name, edited(values)), name, on_meta=on_host)
        yield bad("TND-missing", "TND", option(**{name: None}), name, on_meta=True)

        counts = torch.full((2,), 3, dtype=torch.int32)
        if operator in ("lightning_indexer", "sparse_flash_attention"):
            case = "BSND with lengths"
            s = SMALL[case].s[side]
            yield bad("BSND-beyond S", case, put(name, edited([s + 1, 3])), name)
            yield bad("BSND-negative", case, put(name, edited([-1, 3])), name)
            yield bad("BSND-too many", case, put(name, edited([3, 3, 3])), name, on_meta=True)
        else:
            lengths = [3, 3] if on_host else counts
            yield bad("BSND-given", "BSND", option(**{name: lengths}), name, on_meta=True)

    fewer = put(LENGTHS[1], lambda x: x[:2])
    yield Bad(
        "TND-fewer lengths of keys", operator, "TND", fewer, ValueError, r"actual_seq_lengths_\w+"
    )
    if operator in ("lightning_indexer", "sparse_flash_attention"):
        names = OPERATORS[operator].differentiable
        for name in names:
            if name in good.tensors:
                yield bad(
                    f"BSND-gradient of {name} wanted",
                    "BSND with lengths",
                    lambda sample, name=name: sample.requires_grad((name,)),
                    r"actual_seq_lengths_\w+",
                    on_meta=True,
                )


def index_rows(operator: str) -> Iterator[Bad]:
    def bad(rule: str, case: str, value: int) -> Bad:
        change = put("sparse_indices", first_index(value))
        argument = "sparse_indices"
        return Bad(f"index-{rule}", operator, case, change, ValueError, argument, on_meta=False)

    if operator == "lightning_indexer":
        return
    yield bad("BSND-is S2", "BSND", SMALL["BSND"].s[1])
    yield bad("BSND-below -1", "BSND", -2)
    yield bad("BSND-huge", "BSND", 2**31 - 1)
    # The first sequence has 5 keys of the 14.
    yield bad("TND-is Lk", "TND", 5)
    yield bad("TND-below -1", "TND", -(2**31))
    if operator.startswith("sparse_flash"):
        yield bad("is the number of blocks", "blocks of 8", 3)


def limit_rows(operator: str) -> Iterator[Bad]:
    """With sizes that are good in themselves."""
    device = DEVICE[operator]

    def bad(rule: str, argument: str, *, case: SparseCase | None = None, **sizes: object) -> Bad:
        case = SparseCase(**{**vars(device), **sizes})
        id = f"limits-{rule}"
        return Bad(id, operator, case, lambda sample: sample, ValueError, argument)

    indexer = operator.startswith("lightning_indexer")
    count = "sparse_count" if operator == "lightning_indexer" else "sparse_indices"
    yield bad("K too large", count, k=9216)
    yield bad("K between", count, k=2049)
    yield bad("D", "query", d=64)
    yield bad("N", "query", heads=3)
    yield bad("B", "query", b=257, s=(1, 1))
    yield bad("B 0", "query", b=0)
    yield bad("S1 0", "query", s=(0, 5))
    yield bad("S2 0", "key", s=(5, 0))
    if not indexer:
        yield bad("Dr", "query_rope", rope=32)
    if operator == KL_LOSS:
        yield bad("Nidx", "query_index", index_heads=4)
        yield bad("Didx", "query_index", index_d=64)
        yield bad("no ropes", r"(query|key)_rope", rope=0)
        yield bad("S1 > S2", "query", s=(6, 5))
    if operator == "sparse_flash_attention":
        yield bad("block", "sparse_block_size", block=3)
    if operator == "sparse_flash_attention_grad":
        yield bad("block", "sparse_block_size", block=128)

    as_float = lambda sample: BUILD[operator](device, torch.float32)  # noqa: E731
    yield Bad("limits-float32", operator, device, as_float, TypeError, "query")
    for product in ("950", "310P"):
        yield Bad(
            f"limits-{product}",
            operator,
            device,
            lambda sample: sample,
            NotImplementedError,
            r"\w+",
            product=product,
        )


def table() -> list[Bad]:
    rows: list[Bad] = []
    for operator in BUILD:
        for layout in ("BSND", "TND"):
            rows += tensor_rows(operator, layout)
        for make in (option_rows, length_rows, index_rows, limit_rows):
            rows += make(operator)
    return rows


TABLE = table()
MESSAGE = r"ascend::{operator}: {argument}: expected .+, got .+ \[ACLNN_ERR_[A-Z_]+ \d{{6}}\]"


def check(bad: Bad, sample: Sample) -> None:
    inputs = tuple(sample.tensors.values())
    before = tuple(x.detach().clone() for x in inputs)
    product = bad.product if bad.limited else None
    with (
        ascend_attn_ops.limits(product),
        pytest.raises((TypeError, ValueError, NotImplementedError, RuntimeError)) as raised,
    ):
        sample.call(torch.ops.ascend)
    message = str(raised.value)
    assert raised.type is bad.exception, message
    expected = MESSAGE.format(operator=bad.operator, argument=bad.argument)
    assert re.fullmatch(expected, message), message
    for x, y in zip(inputs, before, strict=True):
        assert x.is_meta or torch.equal(x, y)


@pytest.mark.parametrize("bad", TABLE, ids=lambda bad: f"{bad.operator}-{bad.id}")
def test_bad_call(bad: Bad) -> None:
    check(bad, bad.sample())


@pytest.mark.parametrize(
    "bad",
    [bad for bad in TABLE if bad.on_meta and "device" not in bad.id],
    ids=lambda bad: f"{bad.operator}-{bad.id}",
)
def test_bad_call_on_meta_tensors(bad: Bad) -> None:
    check(bad, bad.sample().to("meta"))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.usefixtures("no_limits")
def test_none_where_a_tensor_must_be(operator: str, device: str) -> None:
    sample = (
        OPERATORS[operator]
        .small_sample()
        .to(device)
        .requires_grad(OPERATORS[operator].differentiable)
    )
    arguments = getattr(torch.ops.ascend, operator).default._schema.arguments
    for name in (a.name for a in arguments if str(a.type) == "Tensor"):
        expected = rf"ascend::{operator}: {name}: expected a tensor, got None \[.*NULLPTR 161001\]"
        with pytest.raises(ValueError, match=expected):
            sample.replace(**{name: None}).call(torch.ops.ascend)


@pytest.mark.parametrize("operator", BUILD)
def test_the_unchanged_calls_are_good(operator: str) -> None:
    """Or else the table would prove nothing."""
    with ascend_attn_ops.limits(None):
        for name, case in SMALL.items():
            blocks = name == "blocks of 8" and not operator.startswith("sparse_flash")
            counts = case.has_counts and not operator.endswith(("indexer", "attention"))
            if not blocks and not counts:
                good_sample(operator, case).call(torch.ops.ascend)
    good_sample(operator, DEVICE[operator]).call(torch.ops.ascend)


def test_unknown_product() -> None:
    with pytest.raises(ValueError, match=r"A2.*A3.*950.*310P"), ascend_attn_ops.limits("A9"):
        pass
