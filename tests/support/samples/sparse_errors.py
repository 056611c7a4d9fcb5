"""The rules that several sparse operators share, and calls that violate them and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from ascend_attn_check.samples.record import Operator
from ascend_attn_check.samples.sparse import LENGTHS, SparseCase
from ascend_attn_ops.reference.call import Sample
from torch import Tensor

from .wrong_call import WrongCall, deeper, elsewhere, filled, flatter, longer, wrong_call

BSND = SparseCase(rope=8, heads=8, index_heads=8)
TND = SparseCase(layout="TND", lengths=((3, 2, 4), (5, 3, 4)), tail=(1, 2), rope=8)
COUNTS = SparseCase(lengths=((5, 3), (7, 4)), rope=8)
BLOCKS = SparseCase(s=(20, 20), block=8, k=2, mode=0)

# Within the device's limits.
DEVICE = SparseCase(heads=8, d=512, rope=64, k=1024, index_heads=8, index_d=128, absorbed=True)


def edited(values: list[int]) -> Callable[[Tensor], Tensor]:
    """Lengths of these values, in the tensor's dtype."""
    return lambda x: torch.tensor(values, dtype=x.dtype)


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
    ("query_index", -2): ("weights",), ("query_index", -1): ("key_index",),
    ("query_rope", -1): ("key_rope",), ("sparse_indices", -1): ("d_values", "attn_softmax_l1_norm"),
}  # fmt: skip


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
    operator: Operator, cases: tuple[object, object] = (BSND, TND),
    argument_of: Callable[[Sample, str, int], str] = argument_of_extent,
) -> Iterator[WrongCall]:  # fmt: skip
    """Rank, dtype, device and every extent of every tensor, in both layouts."""
    for case in cases:
        good = operator.make(case, torch.bfloat16)
        first = next(iter(good.inputs))
        for name, x in good.tensors.items():
            wrong = partial(wrong_call, operator, case)
            dtypes = [torch.int32] if x.is_floating_point() else [torch.int16, torch.float32]
            if name != first:
                yield wrong(**{name: elsewhere})
                others = {torch.float16, torch.float64} if x.is_floating_point() else set()
                dtypes += sorted(others - {x.dtype}, key=str)
            error = TypeError if name.startswith("actual_seq_lengths") else ValueError
            for change in (deeper, flatter):
                yield wrong("", error, **{name: change})
            for dtype in dtypes:
                yield wrong("", TypeError, id=dtype, **{name: methodcaller("to", dtype)})
            for axis in range(-x.dim(), 0):
                argument = argument_of(good, name, axis)
                if argument:
                    yield wrong(f"{argument}: ", id=f"axis {axis}", **{name: longer(axis)})


def option_rules(operator: Operator, modes: tuple[int, ...] = (0, 3)) -> Iterator[WrongCall]:
    wrong = partial(wrong_call, operator, BSND)
    for layout in ("BNSD", "BSH", "bsnd", ""):
        yield wrong(id=layout, layout=layout)
    for mode in sorted({-1, 0, 1, 2, 4, 8} - set(modes)):
        yield wrong(id=mode, sparse_mode=mode)
    arguments = operator.make(BSND, torch.bfloat16).arguments
    for name in ("sparse_count", "sparse_block_size"):
        if name in arguments:
            yield wrong(id=0, **{name: 0})
            yield wrong(id=-1, **{name: -1})
    if "scale_value" in arguments:
        for scale in (math.nan, -math.inf, 1e39):
            yield wrong(id=scale, scale_value=scale)
    if "query_rope" in arguments:
        yield wrong("key_rope: ", key_rope=None)
        yield wrong("query_rope: ", query_rope=None)


def length_rules(operator: Operator) -> Iterator[WrongCall]:
    """Yields wrong lengths, cumulative and not."""
    wrong = partial(wrong_call, operator)
    for side, name in enumerate(LENGTHS):
        given, tokens = TND.length_list(side), TND.tokens(side)[0]
        assert given is not None
        first, second, third = given
        for values in ([second, first, third], [first, second, tokens + 1], [-1, second, third]):
            yield wrong(TND, id=values, on_meta=False, **{name: edited(values)})
        yield wrong(TND, **{name: None})
        for values in ([COUNTS.s[side] + 1, 3], [-1, 3]):
            yield wrong(COUNTS, id=values, on_meta=False, **{name: edited(values)})
        yield wrong(COUNTS, id="too many", **{name: edited([3, 3, 3])})
    yield wrong(TND, r"actual_seq_lengths_\w+: ", **{LENGTHS[1]: lambda x: x[:2]})


def index_rules(operator: Operator) -> Iterator[WrongCall]:
    rules = [
        (BSND, BSND.s[1]), (BSND, -2), (BSND, 2**31 - 1),
        # The first sequence has 5 keys of the 14.
        (TND, 5), (TND, -(2**31)),
    ]  # fmt: skip
    if "sparse_block_size" in operator.make(BSND, torch.bfloat16).arguments:
        rules.append((BLOCKS, 3))
    # The first batch has 6 of the 7 keys. The forward passes over the seventh.
    if not operator.name.endswith("sparse_flash_attention"):
        rules.append((replace(COUNTS, lengths=((5, 3), (6, 4))), 6))
    for case, value in rules:
        change = {"sparse_indices": first_index(value)}
        yield wrong_call(operator, case, id=value, on_meta=False, **change)


def compression_rules(operator: Operator) -> Iterator[WrongCall]:
    """Yields wrong ratios and residuals of keys that stand for several tokens."""
    derived = SparseCase(s=(9, 2), index_heads=8, ratio=4)
    given = replace(derived, s=(9, 5), residuals=(3, 1))
    packed = replace(TND, rope=0, ratio=4, residuals=(0, 3, 1))
    wrong = partial(wrong_call, operator)
    for value in (0, -1, 2**31):
        yield wrong(given, id=value, cmp_ratio=value)
    for case in (given, packed):
        yield wrong(case, cmp_residual_key=deeper)
        yield wrong(case, id="longer", cmp_residual_key=longer(0))
        yield wrong(case, "", TypeError, cmp_residual_key=Tensor.short)
        yield wrong(case, "", TypeError, cmp_residual_key=Tensor.float)
        yield wrong(case, cmp_residual_key=elsewhere)
        for value in (-1, 4, 2**31 - 1):
            yield wrong(case, id=value, on_meta=False, cmp_residual_key=filled(value))
        yield wrong(case, on_meta=case is given, cmp_residual_key=None)
    # Queries and keys that are not of the same tokens.
    for s in ((7, 2), (12, 2)):
        yield wrong(replace(given, s=s, residuals=(0, 0)), cmp_residual_key=None)
    yield wrong(given, "cmp_residual_key: ", cmp_ratio=2, on_meta=False)


# BSND and TND.
PAGES = [replace(COUNTS, page=16), replace(TND, page=16)]


def table_rules(
    wrong: Callable[..., WrongCall], blocks: tuple[int, ...], table: str, key: str, lengths: str
) -> Iterator[WrongCall]:
    """Yields wrong block tables, and keys and lengths that do not fit them."""
    for name in (table, lengths):
        yield wrong(**{name: None})
    for change in (flatter, deeper, elsewhere):
        yield wrong(**{table: change})
    yield wrong(id="longer", **{table: longer(0)})
    for dtype in (torch.int16, torch.float32):
        yield wrong("", TypeError, id=dtype, **{table: methodcaller("to", dtype)})
    for block in blocks:
        yield wrong(id=block, on_meta=False, **{table: filled(block)})
    yield wrong(id="two heads", **{key: longer(2)})
    yield wrong(id="another size", **{key: longer(3)})


def page_rules(operator: Operator) -> Iterator[WrongCall]:
    """Yields wrong calls with paged keys."""
    lengths = LENGTHS[1]
    name = "layout_key" if operator.name.endswith("lightning_indexer") else "layout_kv"
    for case in PAGES:
        wrong = partial(wrong_call, operator, case)
        other = {"BSND": "TND", "TND": "BSND"}[case.layout]
        for layout in (other, "BNSD", "pa_bsnd", ""):
            yield wrong(id=layout, **{name: layout})
        yield wrong("block_table|key|value: ", **{name: None})
        blocks = (-1, case.tokens(1)[0], 2**31 - 1)
        yield from table_rules(wrong, blocks, "block_table", "key", lengths)
        yield wrong(id="rank 3", key=lambda x: x.flatten(0, 1))
        room = (max(map(case.pages_of, case.key_counts)) + 1) * case.page
        for keys in (room + 1, -1):
            change = edited([keys, *case.key_counts[1:]])
            yield wrong(id=keys, on_meta=False, **{lengths: change})
        yield wrong(r"actual_seq_lengths_\w+: ", **{lengths: lambda x: x[:1]})
    yield wrong_call(operator, replace(PAGES[0], rope=0), "key: ", change=_no_rows)
    table = torch.zeros(2, 1, dtype=torch.int32)
    yield wrong_call(operator, COUNTS, block_table=table)


def _no_rows(sample: Sample) -> Sample:
    """Blocks of no rows, in every cache."""
    names = [x for x in ("key", "value", "key_rope") if sample.arguments.get(x) is not None]
    return sample.replace(**{name: sample.arguments[name][:, :0] for name in names})


def page_limit_rules(operator: Operator, device: SparseCase) -> Iterator[WrongCall]:
    paged = replace(device, lengths=((5, 3), (7, 6)))
    for size in (8, 24, 1040):
        yield wrong_call(operator, replace(paged, page=size), "key: ", id=size, limits="A2")


def size_rules(
    operator: Operator, device: Any, rules: Iterable[tuple[str, dict[str, Any]]],
    of_float32: str = "query: ",
) -> Iterator[WrongCall]:  # fmt: skip
    """Yields calls that are good but for the device, from the argument named and the sizes.

    of_float32: the argument that is refused where the sample is one of float32.
    """
    for argument, sizes in rules:
        case = replace(device, **sizes)
        yield wrong_call(operator, case, f"{argument}: ", id=sizes, limits="A2")
    single = {"change": lambda sample: operator.make(device, torch.float32)}
    yield wrong_call(operator, device, of_float32, TypeError, limits="A2", **single)
    yield wrong_call(operator, device, r"\w+: ", NotImplementedError, limits="310P")


def limit_rules(
    operator: Operator, device: SparseCase, *own: tuple[str, dict[str, Any]],
    of_float32: str = "query: ",
) -> Iterator[WrongCall]:  # fmt: skip
    """Sizes that are good in themselves."""
    sizes = ({"d": 64}, {"b": 0}, {"s": (0, 5)}, {"s": (5, 0)})
    return size_rules(operator, device, [*(("query", x) for x in sizes), *own], of_float32)


def token_rules(operator: Operator, device: SparseCase) -> Iterator[WrongCall]:
    """Yields arguments without a meaning in the sparse modes, if the operator refuses them."""
    for name in ("pre_tokens", "next_tokens"):
        yield wrong_call(operator, device, limits="A2", **{name: 5})
