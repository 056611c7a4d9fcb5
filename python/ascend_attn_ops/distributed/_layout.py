"""Which tokens of a batch each rank holds, and how they travel.

The collectives are functional ones, which torch.compile traces as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup
from torch.nn.utils.rnn import pad_sequence

from ascend_attn_ops._core.arguments import wrong

Order = Literal["zigzag", "contiguous"]


class Part(NamedTuple):
    """Consecutive tokens of one sequence, as :class:`SequenceShards` deals them out.

    Attributes:
        sequence: which sequence of the batch.
        begin: the first token, counted from the first of the sequence.
        end: one past the last token.
    """

    sequence: int
    begin: int
    end: int


@dataclass(frozen=True)
class Rows:
    """A part, as the operators see it: queries `begin` to `end` of a sequence of `length` tokens.

    It is part `number` of its rank, and the first of its queries is token `row` of the rank.
    """

    number: int
    row: int
    sequence: int
    begin: int
    end: int
    length: int

    @property
    def count(self) -> int:
        return self.end - self.begin

    @property
    def here(self) -> slice:
        """The queries among the tokens of their rank."""
        return slice(self.row, self.row + self.count)


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which the gradients of x are summed, over the parts and over the ranks."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class Layout:
    """How the tokens of packed sequences are spread over the ranks of a group."""

    def __init__(self, lengths: tuple[int, ...], group: ProcessGroup, order: Order) -> None:
        self.group, self.order = group, order
        self.group_name = group.group_name  # torch.compile reads no attribute of a group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._place(lengths, _parts(lengths, self.world_size, order))

    def _place(self, lengths: tuple[int, ...], parts: Sequence[Sequence[Part]]) -> None:
        """Takes the parts that each rank holds."""
        self.lengths, self.tokens = lengths, sum(lengths)
        # The first token of each sequence in the batch.
        self._starts = [0, *accumulate(lengths)]
        self._rows: list[list[Rows]] = [[] for _ in parts]
        for rows, own in zip(self._rows, parts, strict=True):
            for part in own:
                row = rows[-1].here.stop if rows else 0
                rows.append(Rows(len(rows), row, *part, lengths[part.sequence]))
        held = [
            _concatenated((self.seen(x, x.begin, x.end) for x in rows), "cpu")
            for rows in self._rows
        ]
        self.local_tokens = len(held[self.rank])
        # Collectives want equal sizes: every rank's tokens are padded to this many rows.
        self.width = max(map(len, held))
        padded = [
            rank * self.width + torch.arange(len(tokens), device="cpu")
            for rank, tokens in enumerate(held)
        ]
        self._indices = {
            ("local", "cpu"): held[self.rank],
            # The padded row of each token of the batch.
            ("from_padded", "cpu"): torch.cat(padded)[torch.cat(held).argsort()],
            # The token of each padded row, 0 for padding.
            ("to_padded", "cpu"): pad_sequence(held, batch_first=True).flatten(),
        }

    @property
    def alone(self) -> bool:
        """Whether no token travels."""
        return self.world_size == 1 or self.width == 0

    def rows(self, rank: int | None = None) -> list[Rows]:
        """Returns the rows that a rank holds, by default this one."""
        return self._rows[self.rank if rank is None else rank]

    def seen(self, part: Rows, begin: int, end: int) -> slice:
        """Tokens `begin` to `end` of a part's sequence among those of the batch."""
        start = self._starts[part.sequence]
        return slice(start + begin, start + end)

    def index(self, name: str, device: torch.device) -> Tensor:
        """Returns token numbers on a device; they are copied there once."""
        index = self._indices.get((name, str(device)))
        if index is None:
            index = self._indices[name, "cpu"].to(device)
            if not is_compiling():
                self._indices[name, str(device)] = index
        return index

    def pad(self, x: Tensor) -> Tensor:
        missing = self.width - x.shape[0]
        if missing == 0:
            return x.contiguous()
        return torch.cat((x, x.new_zeros(missing, *x.shape[1:])))

    def start_gather(self, x: Tensor) -> Tensor:
        """Start to send the local tokens (local_tokens, ...) to all ranks; returns padded rows."""
        padded = self.pad(x)
        if self.alone:
            return padded
        where = (self.world_size, self.group_name)
        functional = torch.ops._c10d_functional
        # Two all-gathers under way at once corrupt gloo's memory (seen with torch 2.13 and 2.14)
        # where they allocate their output. So they do not allocate it, or, in a graph, wait for
        # each other.
        if is_compiling():
            rows = functional.all_gather_into_tensor(padded, *where)
            return functional.wait_tensor(rows) if x.device.type == "cpu" else rows
        rows = padded.new_empty(self.world_size * len(padded), *padded.shape[1:])
        return functional.all_gather_into_tensor_out(padded, *where, out=rows)

    def finish_gather(self, rows: Tensor) -> Tensor:
        """Wait for the tokens of all ranks, in the order of the batch: (tokens, ...)."""
        if self.alone:
            return rows
        rows = torch.ops._c10d_functional.wait_tensor(rows)
        return rows.index_select(0, self.index("from_padded", rows.device))

    def gather(self, x: Tensor) -> Tensor:
        return self.finish_gather(self.start_gather(x))

    def collect(self, d: Tensor) -> Tensor:
        """Sum (tokens, ...) over the ranks, and keep the local tokens."""
        if self.alone:
            return d
        # Rows of padding carry token 0, and are cut off at the end.
        rows = d.index_select(0, self.index("to_padded", d.device))
        mine = torch.ops._c10d_functional.reduce_scatter_tensor(
            rows, "sum", self.world_size, self.group_name
        )
        return torch.ops._c10d_functional.wait_tensor(mine)[: self.local_tokens]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks."""
        if self.world_size == 1:
            return x
        total = torch.ops._c10d_functional.all_reduce(x, "sum", self.group_name)
        return torch.ops._c10d_functional.wait_tensor(total)

    def exchange(self, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """Send sent[i] rows of x to rank i, and receive received[i] rows from it, by rank."""
        rows = torch.ops._c10d_functional.all_to_all_single(x, received, sent, self.group_name)
        return torch.ops._c10d_functional.wait_tensor(rows)

    def shard(self, x: Tensor, dim: int = 0) -> Tensor:
        """Take the local tokens out of those of the batch; differentiable.

        Args:
            x: any tensor whose axis `dim` is the T tokens of the batch.
            dim: the axis of the tokens.

        Returns:
            x with `local_tokens` on that axis, a copy. Nothing is communicated.

        Raises:
            ValueError: the axis has not T tokens.
        """
        if x.shape[dim] != self.tokens:
            expected = f"the {self.tokens} tokens of the batch on axis {dim}"
            got = f"shape {tuple(x.shape)}"
            raise wrong(ValueError, "SequenceShards.shard", "x", expected, got)
        return x.index_select(dim, self.index("local", x.device))

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Return the position of each local token in its sequence, as rotary embeddings want it.

        Args:
            device: of the result.

        Returns:
            int64, (local_tokens,).
        """
        return _concatenated((slice(x.begin, x.end) for x in self.rows()), device)

    def parts(self) -> tuple[Part, ...]:
        """Return what this rank holds, in the order in which it holds it."""
        return tuple(Part(x.sequence, x.begin, x.end) for x in self.rows())


def _concatenated(ranges: Iterable[slice], device: torch.device | str | None) -> Tensor:
    """Returns the integers of all ranges as one int64 tensor."""
    numbers = [torch.arange(x.start, x.stop, device=device) for x in ranges]
    return torch.cat([torch.empty(0, dtype=torch.int64, device=device), *numbers])


def _parts(lengths: tuple[int, ...], world_size: int, order: str) -> list[list[Part]]:
    """Returns the parts that each rank holds."""
    result: list[list[Part]] = [[] for _ in range(world_size)]
    owners = (*range(world_size), *reversed(range(world_size)))
    total, start = sum(lengths), 0
    for sequence, length in enumerate(lengths):
        if order == "zigzag":
            cuts = [length * piece // (2 * world_size) for piece in range(2 * world_size + 1)]
        else:
            ends = (total * piece // world_size - start for piece in range(world_size + 1))
            cuts = [min(max(end, 0), length) for end in ends]
        start += length
        for owner, begin, end in zip(owners, cuts, cuts[1:], strict=False):
            parts = result[owner]
            if begin == end:
                continue
            # The two middle pieces of a zig-zag are neighbours on one rank.
            if parts and (parts[-1].sequence, parts[-1].end) == (sequence, begin):
                begin = parts.pop().begin
            parts.append(Part(sequence, begin, end))
    return result


class GatheredKeys:
    """The keys of all ranks, in the place of the local ones: what `prefetch` returns.

    It has copies, which later writes to the local keys do not change. Gradients reach the local
    keys through it.
    """

    def __init__(self, layout: Layout, local: Tensor, sent: Tensor) -> None:
        self.layout, self.local, self.dtype = layout, local, sent.dtype
        self.requires_grad = local.requires_grad
        self._rows = [layout.start_gather(sent.detach())]
        self._arrived: Tensor | None = None
        # torch keeps the tensors of a collective until something waits for it. Keys may be
        # prefetched for a call that never comes.
        weakref.finalize(self, _finish, self._rows).atexit = False

    def wait(self) -> Tensor:
        if self._rows:
            self._arrived = self.layout.finish_gather(self._rows.pop())
        assert self._arrived is not None
        return self._arrived


def _finish(rows: list[Tensor]) -> None:
    for x in rows:
        torch.ops._c10d_functional.wait_tensor(x)


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


# How a kind of tokens is spread over the ranks, and which of them a rank gathers.
Source = Layout | Ranges


class Gather(torch.autograd.Function):
    """Local tokens -> those that a source gathers; gradients are summed on the tokens' ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Source) -> Tensor:
        ctx.source, ctx.dtype = source, x.dtype
        rows = source.gather(x)
        # An output of a Function that is its input would be a view of it.
        return rows.clone() if rows is x else rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return ctx.source.collect(d.to(sum_dtype(d))).to(ctx.dtype), None
