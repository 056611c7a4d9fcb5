"""Calls that the device accepts: within its limits, value the same as key."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from ascend_attn_ops.reference.declaration import Arguments
from ascend_attn_ops.reference.sequences import Row, rows, with_dense_keys
from support.samples import RECIPES, Recipe, Sample
from support.turns import nightly
from torch import Tensor

# Not too many: all of them are in test_npu_equals_cpu.py and test_npu_conformance.py.
DEVICE_RECIPES: list[Recipe] = [recipe for recipe in RECIPES if recipe.on_device]
# CANN keeps the executor of a call for later calls that are alike.
KEEPING_EXECUTORS = ("attention_update", "flash_attention_score", "flash_attention_score_grad")


def first(operator: str) -> Recipe:
    return next(recipe for recipe in DEVICE_RECIPES if recipe.operator.name == operator)


def to_npu(sample: Sample) -> Sample:
    return sample.copied_to("npu")


def rows_of(sample: Sample) -> Iterator[Row]:
    arguments = Arguments(**{"block_table": None, **sample.arguments})
    return rows(with_dense_keys(arguments, "key"))


def cut_blocks_last(sample: Sample) -> Tensor:
    """The indices with the block in which the keys of a row end behind the others that it reads.

    The order within a row is that of the sums: where this one is launched, the bits are those of a
    CPU that is given it.
    """
    given, block = sample.arguments["sparse_indices"], sample.arguments["sparse_block_size"]
    indices = given.flatten(0, -2).clone()
    for row in rows_of(sample):
        read = indices[row.token, : -(-row.limit // block)].tolist()
        read = read[: read.index(-1)] if -1 in read else read
        cut = row.limit // block if row.limit % block else None
        read.sort(key=lambda index, cut=cut: index == cut)
        indices[row.token, : len(read)] = torch.tensor(read, dtype=torch.int32)
    return indices.view(given.shape)


def as_launched(sample: Sample) -> Sample:
    """Returns the sample as the device computes it: with cut blocks behind the others, and with
    key's numbers in the value of sparse attention, in place of which the device reads key."""
    if sample.arguments.get("sparse_block_size", 1) > 1:
        sample = sample.replace(sparse_indices=cut_blocks_last(sample))
    key, value = (sample.arguments.get(name) for name in ("key", "value"))
    if not sample.operator.startswith("sparse_flash_attention") or value is key:
        return sample
    return sample.replace(value=key.clone())


def is_launched(recipe: Recipe) -> bool:
    """CANN's host code refuses some heads of attention_update, before there is a kernel."""
    return recipe.operator.name != "attention_update" or recipe.case.d % 8 == 0


def is_pack_gradient(recipe: Recipe) -> bool:
    """The gradient of lightning_indexer in a pack of several sequences: one launch for each run of
    equal ones, whose lengths the host waits for."""
    is_gradient = recipe.operator.name == "lightning_indexer_grad"
    return is_gradient and recipe.case.layout == "TND" and len(recipe.case.lengths[0]) > 1


def one_of_each(recipes: Iterable[Recipe]) -> list[Any]:
    """Returns parameters of a test that shows that arguments arrive: nightly, but for the first
    recipe of each operator, layout, mode and set of arguments. At the levels of the queue that do
    not run every test, the first of each operator and layout."""
    seen, found = set(), []
    for recipe in recipes:
        arguments = recipe.make(torch.bfloat16).arguments
        kind = (recipe.operator.name, recipe.layout)
        if os.environ["TASK_QUEUE_ENABLE"] == "1":
            present = frozenset(name for name, x in arguments.items() if x is not None)
            kind = (*kind, arguments.get("sparse_mode"), present)
        marks = [nightly] if kind in seen else []
        found.append(pytest.param(recipe, marks=marks, id=recipe.id))
        seen.add(kind)
    return found
