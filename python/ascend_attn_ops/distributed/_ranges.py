"""Ranges of tokens around the parts of a rank, which come from the ranks that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

import torch
from torch import Tensor

from ascend_attn_ops.distributed._layout import Layout, Rows

# Tokens of a rank: the rank, the first of its local tokens, and one past the last.
_Piece = tuple[int, int, int]


class Ranges:
    """For each part of a rank some tokens of its sequence, one part after another.

    `wanted` returns the first token that a part needs of its sequence, and one past the last.
    """

    def __init__(self, layout: Layout, wanted: Callable[[Rows], tuple[int, int]]) -> None:
        self.layout, self.local_tokens = layout, layout.local_tokens
        self.wanted = [wanted(part) for part in layout.rows()]
        self._begins = [0, *accumulate(end - begin for begin, end in self.wanted)]
        mine, ranks = layout.rank, range(layout.world_size)
        needs = _needs(layout, wanted)
        # On all ranks alike: a collective wants all of them.
        self._travel = any(owner != rank for rank in ranks for owner, _, _ in needs[rank])
        sent = [[x for x in needs[rank] if x[0] == mine != rank] for rank in ranks]
        received = [[x for x in needs[mine] if x[0] == rank != mine] for rank in ranks]
        self._sent = [piece for pieces in sent for piece in pieces]
        self._sent_counts, self._received_counts = _counts(sent), _counts(received)
        # The needed tokens, of the local ones and, behind them, of those received, by rank.
        following = [0, *accumulate(self._received_counts)]
        self._needs: list[_Piece] = []
        for owner, begin, end in needs[mine]:
            if owner != mine:
                count, begin = end - begin, self.local_tokens + following[owner]
                end = begin + count
                following[owner] += count
            self._needs.append((mine, begin, end))

    def seen(self, part: Rows, begin: int, end: int) -> slice:
        """Tokens `begin` to `end` of a part's sequence among those that were gathered."""
        start = self._begins[part.number] - self.wanted[part.number][0]
        return slice(start + begin, start + end)

    def gather(self, x: Tensor) -> Tensor:
        """Local tokens (local_tokens, ...) -> the tokens of all ranges."""
        if self._travel:
            sent = _taken(x, self._sent)
            received = self.layout.exchange(sent, self._received_counts, self._sent_counts)
            x = torch.cat((x, received))
        return _taken(x, self._needs)

    def collect(self, d: Tensor) -> Tensor:
        """Sums gradients of the tokens of all ranges, on the ranks that hold the tokens."""
        total = d.new_zeros(self.local_tokens + sum(self._received_counts), *d.shape[1:])
        _add(total, self._needs, d)
        if not self._travel:
            return total
        own, theirs = total[: self.local_tokens], total[self.local_tokens :]
        returned = self.layout.exchange(theirs, self._sent_counts, self._received_counts)
        _add(own, self._sent, returned)
        return own


def _needs(layout: Layout, wanted: Callable[[Rows], tuple[int, int]]) -> list[list[_Piece]]:
    """The tokens that each rank needs for its parts, in the order in which it needs them."""
    holders: dict[int, list[tuple[int, Rows]]] = {}
    for owner in range(layout.world_size):
        for part in layout.rows(owner):
            holders.setdefault(part.sequence, []).append((owner, part))
    for held in holders.values():
        held.sort(key=lambda owner_and_part: owner_and_part[1].begin)
    needs: list[list[_Piece]] = [[] for _ in range(layout.world_size)]
    for rank, pieces in enumerate(needs):
        for part in layout.rows(rank):
            begin, end = wanted(part)
            for owner, theirs in holders[part.sequence]:
                first, last = max(begin, theirs.begin), min(end, theirs.end)
                if first < last:
                    row = theirs.row - theirs.begin
                    pieces.append((owner, row + first, row + last))
    return needs


def _counts(pieces: Iterable[Iterable[_Piece]]) -> list[int]:
    return [sum(end - begin for _, begin, end in of_rank) for of_rank in pieces]


def _taken(x: Tensor, pieces: Iterable[_Piece]) -> Tensor:
    return torch.cat([x[:0], *(x[begin:end] for _, begin, end in pieces)])


def _add(total: Tensor, pieces: Iterable[_Piece], d: Tensor) -> None:
    """Adds rows of d, which follow each other, to those of the pieces."""
    row = 0
    for _, begin, end in pieces:
        total[begin:end] += d[row : row + end - begin]
        row += end - begin
