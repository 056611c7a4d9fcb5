"""Ranges of tokens around the parts of a rank, which come from the ranks that hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ascend_attn_ops.distributed._communication import exchange, sum_dtype
from ascend_attn_ops.distributed._layout import Layout, Rows


class _Piece(NamedTuple):
    """Tokens of one rank that another needs: `begin` to `end` of its local tokens."""

    owner: int
    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin


class Ranges:
    """For each part of a rank some tokens of its sequence, one part after another.

    Args:
        layout: which tokens the ranks hold.
        wanted: the first token that a part needs of its sequence, and one past the last.
    """

    def __init__(self, layout: Layout, wanted: Callable[[Rows], tuple[int, int]]) -> None:
        self.layout, self.local_tokens = layout, layout.local_tokens
        rank, size = layout.rank, layout.world_size
        holders = _holders(layout)
        every = [_pieces(layout.rows(other), holders, wanted) for other in range(size)]
        self.wanted = [wanted(part) for part in layout.rows()]
        self._begins = [0]
        for begin, end in self.wanted:
            self._begins.append(self._begins[-1] + end - begin)
        self._pieces = every[rank]
        self._sent = [
            [piece for piece in pieces if piece.owner == rank and other != rank]
            for other, pieces in enumerate(every)
        ]
        self._sent_counts = [sum(piece.length for piece in pieces) for pieces in self._sent]
        self._received_counts = [
            sum(piece.length for piece in self._pieces if piece.owner == other and other != rank)
            for other in range(size)
        ]
        # On all ranks alike: a collective wants all of them.
        self._nothing_travels = all(
            piece.owner == other for other, pieces in enumerate(every) for piece in pieces
        )
        ends = [0, *(piece.end for piece in self._pieces)]
        begins = [*(piece.begin for piece in self._pieces), self.local_tokens]
        self._is_local = self._nothing_travels and ends == begins

    def seen(self, part: Rows, begin: int, end: int) -> slice:
        """Tokens `begin` to `end` of a part's sequence among those that were gathered."""
        start = self._begins[part.number] - self.wanted[part.number][0]
        return slice(start + begin, start + end)

    def gather(self, x: Tensor) -> Tensor:
        """Local tokens (local_tokens, ...) -> the tokens of all ranges."""
        if self._is_local:
            return x
        received = x[:0]
        if not self._nothing_travels:
            sent = [x[piece.begin : piece.end] for pieces in self._sent for piece in pieces]
            received = exchange(
                self.layout, torch.cat([x[:0], *sent]), self._received_counts, self._sent_counts
            )
        rows = [
            (x if piece.owner == self.layout.rank else received)[begin : begin + piece.length]
            for piece, begin in zip(self._pieces, self._sources(), strict=True)
        ]
        return torch.cat([x[:0], *rows])

    def collect(self, d: Tensor) -> Tensor:
        """Sums gradients of the tokens of all ranges, on the ranks that hold the tokens."""
        if self._is_local:
            return d
        total = d.new_zeros(self.local_tokens, *d.shape[1:])
        theirs: list[list[Tensor]] = [[] for _ in range(self.layout.world_size)]
        row = 0
        for piece in self._pieces:
            rows = d[row : row + piece.length]
            row += piece.length
            if piece.owner == self.layout.rank:
                total[piece.begin : piece.end] += rows
            else:
                theirs[piece.owner].append(rows)
        if self._nothing_travels:
            return total
        sent = torch.cat([d[:0], *(rows for of_rank in theirs for rows in of_rank)])
        received = exchange(self.layout, sent, self._sent_counts, self._received_counts)
        row = 0
        for pieces in self._sent:
            for piece in pieces:
                total[piece.begin : piece.end] += received[row : row + piece.length]
                row += piece.length
        return total

    def _sources(self) -> list[int]:
        """The first row of each piece among the local tokens, or among those received."""
        rows = [0]
        for count in self._received_counts:
            rows.append(rows[-1] + count)
        begins = []
        for piece in self._pieces:
            if piece.owner == self.layout.rank:
                begins.append(piece.begin)
            else:
                begins.append(rows[piece.owner])
                rows[piece.owner] += piece.length
        return begins


def _holders(layout: Layout) -> dict[int, list[tuple[int, Rows]]]:
    """The ranks and parts of each sequence, from its first token to its last."""
    holders: dict[int, list[tuple[int, Rows]]] = {}
    for owner in range(layout.world_size):
        for part in layout.rows(owner):
            holders.setdefault(part.sequence, []).append((owner, part))
    for held in holders.values():
        held.sort(key=lambda owner_and_part: owner_and_part[1].begin)
    return holders


def _pieces(
    parts: list[Rows],
    holders: dict[int, list[tuple[int, Rows]]],
    wanted: Callable[[Rows], tuple[int, int]],
) -> list[_Piece]:
    """The tokens that a rank needs for its parts, in the order in which it needs them."""
    pieces = []
    for part in parts:
        begin, end = wanted(part)
        for owner, theirs in holders[part.sequence]:
            first, last = max(begin, theirs.begin), min(end, theirs.end)
            if first < last:
                row = theirs.row - theirs.begin
                pieces.append(_Piece(owner, row + first, row + last))
    return pieces


class GatherRanges(torch.autograd.Function):
    """Local tokens -> the tokens of all ranges; gradients are summed on the ranks of the tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranges: Ranges) -> Tensor:
        ctx.ranges, ctx.dtype = ranges, x.dtype
        rows = ranges.gather(x)
        # An output of a Function that is its input would be a view of it.
        return rows.clone() if rows is x else rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return ctx.ranges.collect(d.to(sum_dtype(d))).to(ctx.dtype), None
