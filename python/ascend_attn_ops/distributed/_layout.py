"""Which tokens of a batch each rank holds, and how they travel.

The collectives are functional ones, which torch.compile traces as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

Order = Literal["zigzag", "contiguous"]


class Part(NamedTuple):
    """Consecutive tokens of one sequence.

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

    Attributes:
        number: of the part among those of its rank.
        row: the first of the queries among the tokens of its rank.
        sequence: which sequence of the batch.
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
            raise ValueError(
                f"SequenceShards.shard: x: expected the {self.tokens} tokens of the batch on axis "
                f"{dim}, got shape {tuple(x.shape)}"
            )
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


class Gather(torch.autograd.Function):
    """Local tokens -> those that a source gathers; gradients are summed on the tokens' ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Any) -> Tensor:
        ctx.source, ctx.dtype = source, x.dtype
        rows: Tensor = source.gather(x)
        # An output of a Function that is its input would be a view of it.
        return rows.clone() if rows is x else rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return ctx.source.collect(d.to(sum_dtype(d))).to(ctx.dtype), None
