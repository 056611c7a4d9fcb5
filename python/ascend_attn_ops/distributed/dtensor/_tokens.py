"""Sequence lengths for a rank that has the query tokens [begin, end), and all keys."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ascend_attn_ops._core.statistics import by_head, by_sequence
from ascend_attn_ops.distributed.dtensor._placements import Part

_CAUSAL = 3


def packed_lengths(
    query: Tensor, key: Tensor, part: Part, sparse_mode: int
) -> tuple[Tensor, Tensor]:
    """Returns cumulative lengths of the sequences cut to `part`, with their keys where they are.

    A sequence without queries here keeps its keys, which nothing reads. In the causal mode the last
    query sees the last key: the sequence that goes on after the part loses the keys that only its
    later queries see.
    """
    cut = query.clamp(part.begin, part.end) - part.begin
    if sparse_mode != _CAUSAL or len(query) == 0:
        return cut, key
    goes_on = _before(query) < part.end
    later = (query - part.end).clamp(min=0) * goes_on
    return cut, torch.maximum(key - later, _before(key))


def _before(ends: Tensor) -> Tensor:
    """Where sequences begin, from where they end."""
    return torch.cat((ends.new_zeros(1), ends[:-1]))


def padded_lengths(
    query: Tensor | None, key: Tensor | None, part: Part, sparse_mode: int, sizes: Mapping[str, int]
) -> tuple[Tensor, Tensor]:
    """The same for one count per batch; None for all tokens."""
    given = key if query is None else query
    assert given is not None
    query = torch.full_like(given, sizes["S"]) if query is None else query
    key = torch.full_like(given, sizes["T"]) if key is None else key
    cut = (query - part.begin).clamp(0, part.size)
    if sparse_mode != _CAUSAL:
        return cut, key
    return cut, (key - (query - part.end).clamp(min=0)).clamp(min=0)


def unseen_keys(queries: int, part: Part, sparse_mode: int) -> int:
    """How many keys of a padded batch without lengths are later than the queries of `part`."""
    return queries - part.end if sparse_mode == _CAUSAL else 0


def heads_of_sequences(statistic: Tensor, ends: Tensor, part: Part) -> Tensor:
    """The heads of `part`, of statistics stored as (N, Sq, 8) of one sequence after another."""
    return by_sequence(by_head(statistic, ends)[part.begin : part.end], ends)
