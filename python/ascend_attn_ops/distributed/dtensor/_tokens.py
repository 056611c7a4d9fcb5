"""Sequence lengths for a rank that has the query tokens [begin, end), and all keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_attn_ops._statistics import by_head, by_sequence
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
    query: Tensor, key: Tensor, part: Part, sparse_mode: int
) -> tuple[Tensor, Tensor]:
    """The same for one count per batch."""
    cut = (query - part.begin).clamp(0, part.size)
    if sparse_mode != _CAUSAL:
        return cut, key
    return cut, (key - (query - part.end).clamp(min=0)).clamp(min=0)


def visible_keys(queries: int, keys: int, part: Part, sparse_mode: int) -> int:
    """How many leading keys of a padded batch the queries of `part` see, without lengths."""
    return keys - (queries - part.end) if sparse_mode == _CAUSAL else keys


def heads_of_sequences(statistic: Tensor, ends: Tensor, part: Part) -> Tensor:
    """The heads of `part`, of statistics stored as (N, Sq, 8) of one sequence after another."""
    return by_sequence(by_head(statistic, ends)[part.begin : part.end], ends)
