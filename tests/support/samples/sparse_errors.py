"""The rules that several sparse operators share, and calls that violate them and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from ascend_attn_ops.check.samples.record import Operator
from ascend_attn_ops.check.samples.sample import Sample
from ascend_attn_ops.check.samples.sparse import LENGTHS, SparseCase
from torch import Tensor

from .wrong_call import WrongCall, elsewhere, longer, put

BSND = SparseCase(rope=8, heads=8, index_heads=8)
TND = SparseCase(layout="TND", lengths=((3, 2, 4), (5, 3, 4)), tail=(1, 2), rope=8)
COUNTS = SparseCase(lengths=((5, 3), (7, 4)), rope=8)
BLOCKS = SparseCase(s=(20, 20), block=8, k=2, mode=0)

# Within the device's limits.
DEVICE = SparseCase(heads=8, d=512, rope=64, k=1024, index_heads=8, index_d=128, absorbed=True)


def edited(values: list[int]) -> Callable[[object], object]:
    """Lengths of these values, in a tensor or a list as the operator takes them."""
    return lambda x: torch.tensor(values, dtype=x.dtype) if isinstance(x, Tensor) else values


def first_index(value: int) -> Callable[[Tensor], Tensor]:
    """In the first slot of the last query of the first batch, which every mode lets see a key."""

    def change(indices: Tensor) -> Tensor:
        indices = indices.clone()
        row = indices[0, -1] if indices.dim() == 4 else indices[2]
        row[0, 0] = value
        return indices

    return change


# The first of several arguments sets the extent that they share; the error names another.
NAMED = {
    ("query_index", -2): ("weights",),
    ("query_index", -1): ("key_index",),
    ("query_rope", -1): ("key_rope",),
    ("sparse_indices", -1): ("d_values", "attn_softmax_l1_norm"),
}


def argument_of_extent(good: Sample, name: str, axis: int) -> str:
    """The arguments that an error may name where this axis is too long; empty if it may be."""
    first, key = list(good.inputs)[:2]
    # Nothing else has the extent of the keys, or of the selection.
    keys_alone = not {"value", "key_index"} - {key} & good.arguments.keys()
    is_keys = name == key and axis == -3
    if is_keys and keys_alone:
        return ""
    if is_keys or name == first or name in LENGTHS:
        return r"\w+"
    named = NAMED.get((name, axis), (name,))
    return next((x for x in named if x in good.arguments), "")


def tensor_rules(
    operator: Operator,
    cases: tuple[object, object] = (BSND, TND),
    argument_of: Callable[[Sample, str, int], str] = argument_of_extent,
) -> Iterator[WrongCall]:
    """Rank, dtype, device and every extent of every tensor, in both layouts."""
    for case, layout in zip(cases, ("BSND", "TND"), strict=True):
        good = operator.make(case, torch.bfloat16)
        for name, x in good.tensors.items():

            def wrong(
                rule: str,
                change: Callable[[Tensor], object],
                exception: type[Exception] = ValueError,
                argument: str = name,
                case: object = case,
                name: str = name,
                layout: str = layout,
            ) -> WrongCall:
                id = f"{layout}-{name}-{rule}"
                return WrongCall(
                    id, operator, case, put(name, change), argument, exception,
                    on_meta=change is not elsewhere,
                )  # fmt: skip

            yield wrong("rank too high", lambda x: x[None])
            yield wrong("rank too low", lambda x: x[0])
            if x.is_floating_point():
                yield wrong("integer", Tensor.int, TypeError)
            else:
                yield wrong("int64", Tensor.long, TypeError)
                yield wrong("float", Tensor.float, TypeError)
            if name != next(iter(good.inputs)):
                yield wrong("on another device", elsewhere)
                if x.is_floating_point():
                    yield wrong("float16", Tensor.half, TypeError)
                    yield wrong("float64", Tensor.double, TypeError)
            for axis in range(-x.dim(), 0):
                argument = argument_of(good, name, axis)
                if argument:
                    yield wrong(f"axis {axis} too long", longer(axis), ValueError, argument)


def option_rules(operator: Operator, modes: tuple[int, ...] = (0, 3)) -> Iterator[WrongCall]:
    def wrong(rule: str, argument: str, **change: object) -> WrongCall:
        return WrongCall(rule, operator, BSND, change, argument)

    for layout in ("BNSD", "BSH", "bsnd", ""):
        yield wrong(f"layout {layout!r}", "layout", layout=layout)
    for mode in sorted({-1, 0, 1, 2, 4, 8} - set(modes)):
        yield wrong(f"sparse_mode {mode}", "sparse_mode", sparse_mode=mode)
    arguments = operator.make(BSND, torch.bfloat16).arguments
    for name in ("sparse_count", "sparse_block_size"):
        if name in arguments:
            yield wrong(f"{name} 0", name, **{name: 0})
            yield wrong(f"{name} negative", name, **{name: -1})
    if "scale_value" in arguments:
        for scale in (math.nan, -math.inf, 1e39):
            yield wrong(f"scale_value {scale}", "scale_value", scale_value=scale)
    if "query_rope" in arguments:
        yield wrong("query_rope alone", "key_rope", key_rope=None)
        yield wrong("key_rope alone", "query_rope", query_rope=None)


def length_rules(operator: Operator) -> Iterator[WrongCall]:
    """Yields wrong lengths, cumulative and not."""

    def wrong(
        rule: str, case: SparseCase, name: str, change: Callable[[object], object], on_meta: bool
    ) -> WrongCall:
        return WrongCall(f"{rule}-{name}", operator, case, put(name, change), name, on_meta=on_meta)

    good = operator.make(TND, torch.bfloat16)
    on_host = isinstance(good.arguments[LENGTHS[0]], list)
    for side, name in enumerate(LENGTHS):
        given, tokens = TND.length_list(side), TND.tokens(side)[0]
        assert given is not None
        for rule, values in {
            "decreasing": [given[1], given[0], given[2]],
            "beyond T": [*given[:2], tokens + 1],
            "negative": [-1, *given[1:]],
        }.items():
            yield wrong(f"TND-{rule}", TND, name, edited(values), on_host)
        yield wrong("TND-missing", TND, name, lambda x: None, True)
    yield WrongCall(
        "TND-fewer lengths of keys", operator, TND, put(LENGTHS[1], lambda x: x[:2]),
        r"actual_seq_lengths_\w+",
    )  # fmt: skip
    for side, name in enumerate(LENGTHS):
        for rule, values, on_meta in (
            ("beyond S", [COUNTS.s[side] + 1, 3], on_host),
            ("negative", [-1, 3], on_host),
            ("too many", [3, 3, 3], True),
        ):
            yield wrong(f"BSND-{rule}", COUNTS, name, edited(values), on_meta)


def index_rules(operator: Operator) -> Iterator[WrongCall]:
    def wrong(rule: str, case: SparseCase, value: int) -> WrongCall:
        change = put("sparse_indices", first_index(value))
        id = f"index-{rule}"
        return WrongCall(id, operator, case, change, "sparse_indices", on_meta=False)

    yield wrong("BSND-is S2", BSND, BSND.s[1])
    yield wrong("BSND-below -1", BSND, -2)
    yield wrong("BSND-huge", BSND, 2**31 - 1)
    # The first sequence has 5 keys of the 14.
    yield wrong("TND-is Lk", TND, 5)
    yield wrong("TND-below -1", TND, -(2**31))
    if "sparse_block_size" in operator.make(BSND, torch.bfloat16).arguments:
        yield wrong("is the number of blocks", BLOCKS, 3)
    # The first batch has 6 of the 7 keys. The forward passes over the seventh.
    if operator.name != "sparse_flash_attention":
        yield wrong("BSND-behind the length", replace(COUNTS, lengths=((5, 3), (6, 4))), 6)


def compression_rules(operator: Operator) -> Iterator[WrongCall]:
    """Yields wrong ratios and residuals of keys that stand for several tokens."""
    ratio, residual = "cmp_ratio", "cmp_residual_key"
    derived = SparseCase(s=(9, 2), index_heads=8, ratio=4)
    given = replace(derived, s=(9, 5), residuals=(3, 1))
    packed = replace(TND, rope=0, ratio=4, residuals=(0, 3, 1))
    for value in (0, -1, 2**31):
        yield WrongCall(f"ratio {value}", operator, given, {ratio: value}, ratio)

    def wrong(
        rule: str, case: SparseCase, change: Callable[[Tensor], object],
        exception: type[Exception] = ValueError, on_meta: bool = False,
    ) -> WrongCall:  # fmt: skip
        id = f"residual-{case.layout}-{rule}"
        change_of = put(residual, change)
        return WrongCall(id, operator, case, change_of, residual, exception, on_meta=on_meta)

    for case in (given, packed):
        yield wrong("rank 2", case, lambda x: x[None], on_meta=True)
        yield wrong("too many", case, longer(0), on_meta=True)
        yield wrong("int64", case, Tensor.long, TypeError, on_meta=True)
        yield wrong("float", case, Tensor.float, TypeError, on_meta=True)
        yield wrong("elsewhere", case, elsewhere)
        for value in (-1, 4, 2**31 - 1):
            yield wrong(f"is {value}", case, lambda x, value=value: x.clone().fill_(value))
        yield wrong("missing", case, lambda x: None, on_meta=case is given)
    # Queries and keys that are not of the same tokens.
    for s in ((7, 2), (12, 2)):
        case = replace(given, s=s, residuals=(0, 0))
        yield wrong(f"none of {s}", case, lambda x: None, on_meta=True)
    yield WrongCall("residual-of ratio 2", operator, given, {ratio: 2}, residual, on_meta=False)


# BSND and TND.
PAGES = [
    replace(COUNTS, page=16),
    replace(TND, page=16),
]


def page_rules(operator: Operator) -> Iterator[WrongCall]:
    """Yields wrong calls with paged keys."""

    def wrong(
        rule: str, case: SparseCase, change: object, argument: str,
        exception: type[Exception] = ValueError, on_meta: bool = True,
    ) -> WrongCall:  # fmt: skip
        id = f"pages-{case.layout}-{rule}"
        return WrongCall(id, operator, case, change, argument, exception, on_meta=on_meta)

    key_lengths = LENGTHS[1]
    for case in PAGES:
        other = {"BSND": "TND", "TND": "BSND"}[case.layout]
        for layout in (other, "BNSD", "pa_bsnd", ""):
            yield wrong(f"layout_key {layout!r}", case, {"layout_key": layout}, "layout_key")
        yield wrong("no table", case, {"block_table": None}, "block_table")
        yield wrong("no lengths", case, {key_lengths: None}, key_lengths)
        yield wrong("layout_key None", case, {"layout_key": None}, r"block_table|key|value")
        for rule, change, exception in (
            ("rank 1", lambda x: x[0], ValueError),
            ("rank 3", lambda x: x[None], ValueError),
            ("too many sequences", longer(0), ValueError),
            ("int64", Tensor.long, TypeError),
            ("float", Tensor.float, TypeError),
        ):
            yield wrong(f"table-{rule}", case, put("block_table", change), "block_table", exception)
        yield wrong(
            "table-elsewhere", case, put("block_table", elsewhere), "block_table", on_meta=False
        )
        yield wrong("key-rank 3", case, put("key", lambda x: x.flatten(0, 1)), "key")
        yield wrong("key-two heads", case, put("key", longer(2)), "key")
        yield wrong("key-another size", case, put("key", longer(3)), "key")
        for block in (-1, case.tokens(1)[0], 2**31 - 1):
            change = put("block_table", lambda x, block=block: x.clone().fill_(block))
            yield wrong(f"block {block}", case, change, "block_table", on_meta=False)
        room = (max(map(case.pages_of, case.key_counts)) + 1) * case.page
        for rule, values in {"beyond the table": room + 1, "negative": -1}.items():
            change = edited([values, *case.key_counts[1:]])
            yield wrong(
                f"lengths-{rule}", case, put(key_lengths, change), key_lengths, on_meta=False
            )
        yield wrong(
            "lengths-fewer", case, put(key_lengths, lambda x: x[:1]), r"actual_seq_lengths_\w+"
        )
    yield wrong("without rows", replace(PAGES[0], rope=0), _no_rows, "key")
    yield WrongCall(
        "pages-table of dense keys", operator, COUNTS,
        {"block_table": torch.zeros(2, 1, dtype=torch.int32)}, "block_table",
    )  # fmt: skip


def _no_rows(sample: Sample) -> Sample:
    """Blocks of no rows, in every cache."""
    names = [x for x in ("key", "value", "key_rope") if sample.arguments.get(x) is not None]
    return sample.replace(**{name: sample.arguments[name][:, :0] for name in names})


def page_limit_rules(operator: Operator, device: SparseCase) -> Iterator[WrongCall]:
    paged = replace(device, lengths=((5, 3), (7, 6)))
    for size in (8, 24, 1040):
        yield WrongCall(
            f"limits-pages of {size}", operator, replace(paged, page=size), None, "key", limits="A2"
        )


def limit_rules(
    operator: Operator, device: SparseCase, **own: tuple[str, dict[str, object]]
) -> Iterator[WrongCall]:
    """Sizes that are good in themselves. `own` has, by rule, the argument named and the sizes."""
    rules: dict[str, tuple[str, dict[str, object]]] = {
        "D": ("query", {"d": 64}),
        "B 0": ("query", {"b": 0}),
        "S1 0": ("query", {"s": (0, 5)}),
        "S2 0": ("query", {"s": (5, 0)}),
        **own,
    }
    for rule, (argument, sizes) in rules.items():
        case = replace(device, **sizes)
        yield WrongCall(f"limits-{rule}", operator, case, None, argument, limits="A2")
    yield WrongCall(
        "limits-float32", operator, device, lambda sample: operator.make(device, torch.float32),
        "query", TypeError, limits="A2",
    )  # fmt: skip
    yield WrongCall(
        "limits-310P", operator, device, None, r"\w+", NotImplementedError, limits="310P"
    )


def token_rules(operator: Operator, device: SparseCase) -> Iterator[WrongCall]:
    """Yields arguments without a meaning in the sparse modes, if the operator refuses them."""
    for name in ("pre_tokens", "next_tokens"):
        yield WrongCall(f"limits-{name}", operator, device, {name: 5}, name, limits="A2")
