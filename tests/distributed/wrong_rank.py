"""Calls that are wrong on one of three ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ascend_attn_ops.distributed import SequenceShards
from torch import Tensor
from torch.distributed import ProcessGroup

WRONG_RANK = 2

Changes = dict[str, Callable[[Tensor], Any]]
# Function, what is wrong on one rank (tensors, options), and what all ranks are told.
Case = tuple[Any, Changes, dict[str, Any], str]


def message(call: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011, the message has the type
        call()
    return f"{caught.type.__name__}: {caught.value}"


def message_of_case(
    group: ProcessGroup, case: Case, x: dict[str, Tensor], shards: SequenceShards
) -> str:
    """Return the message of this rank, between two calls that succeed: ranks stay in step."""
    function, changes, options, _ = case
    function(x, shards)
    if group.rank() == WRONG_RANK:
        wrong = {**x, **{key: change(x[key]) for key, change in changes.items()}}
        text = message(lambda: function(wrong, shards, **options))
    else:
        text = message(lambda: function(x, shards))
    function(x, shards)
    return text


def assert_all_are_told(messages: list[str], expected: str) -> None:
    assert len(set(messages)) == 1
    assert re.match(expected, messages[0]), messages[0]


def twice(x: Tensor) -> Tensor:
    return torch.cat((x, x))
