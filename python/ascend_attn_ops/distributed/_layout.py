"""Which tokens of a batch each rank holds; nothing here communicates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup

Order = Literal["zigzag", "contiguous"]

# None marks an omitted optional tensor. The operators check that no other is omitted.
Tensors = Sequence[Any]


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


PartsOfRanks = tuple[tuple[Part, ...], ...]


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

    def queries(self, tensors: Tensors) -> list[Any]:
        """Their rows of the rank's tokens, as batches of one."""
        return [x if x is None else x[self.here].unsqueeze(0) for x in tensors]


class Layout:
    """How the tokens of packed sequences are spread over the ranks of a group."""

    def __init__(self, lengths: tuple[int, ...], group: ProcessGroup, order: Order) -> None:
        self._place(lengths, group, order, _parts(lengths, dist.get_world_size(group), order))

    def _place(
        self, lengths: tuple[int, ...], group: ProcessGroup, order: Order, parts: PartsOfRanks
    ) -> None:
        self.lengths, self.group, self.order = lengths, group, order
        self.group_name = group.group_name  # torch.compile reads no attribute of a group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.tokens = sum(lengths)
        # The first token of each sequence in the batch.
        self._starts = starts = _starts(lengths)
        self._parts = parts
        self._rows = [
            [
                Rows(number, row, part.sequence, part.begin, part.end, lengths[part.sequence])
                for number, (part, row) in enumerate(zip(own, _begins(own), strict=False))
            ]
            for own in parts
        ]
        sizes = [sum(part.count for part in rows) for rows in self._rows]
        self.local_tokens = sizes[self.rank]
        # Collectives want equal sizes: every rank's tokens are padded to this many rows.
        self.width = max(sizes)
        # The padded row of each token of the batch; and the token of each padded row, 0 for
        # padding.
        from_padded = torch.empty(self.tokens, dtype=torch.int64, device="cpu")
        to_padded = torch.zeros(self.world_size * self.width, dtype=torch.int64, device="cpu")
        for rank, rows in enumerate(self._rows):
            tokens = _concatenated(
                ((starts[x.sequence] + x.begin, starts[x.sequence] + x.end) for x in rows), "cpu"
            )
            padded = rank * self.width + torch.arange(len(tokens), device="cpu")
            from_padded[tokens], to_padded[padded] = padded, tokens
            if rank == self.rank:
                local = tokens
        self._indices = {
            ("local", "cpu"): local,
            ("from_padded", "cpu"): from_padded,
            ("to_padded", "cpu"): to_padded,
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
        return _concatenated(((begin, end) for _, begin, end in self.parts()), device)

    def parts(self) -> tuple[Part, ...]:
        """Return what this rank holds, in the order in which it holds it."""
        return self._parts[self.rank]


def _begins(parts: tuple[Part, ...]) -> Iterator[int]:
    """The row of each part's first token; one more at the end."""
    return accumulate((end - begin for _, begin, end in parts), initial=0)


def _concatenated(
    ranges: Iterable[tuple[int, int]], device: torch.device | str | None = None
) -> Tensor:
    """Returns the integers of all ranges as one int64 tensor."""
    numbers = [torch.arange(begin, end, device=device) for begin, end in ranges]
    return torch.cat([torch.empty(0, dtype=torch.int64, device=device), *numbers])


def _starts(lengths: tuple[int, ...]) -> list[int]:
    """Returns the first token of each sequence in the batch."""
    return [end - n for end, n in zip(accumulate(lengths), lengths, strict=True)]


def _parts(lengths: tuple[int, ...], world_size: int, order: str) -> PartsOfRanks:
    """Returns the parts that each rank holds."""
    result: list[list[Part]] = [[] for _ in range(world_size)]
    total = sum(lengths)
    for sequence, (start, length) in enumerate(zip(_starts(lengths), lengths, strict=True)):
        if order == "zigzag":
            count = 2 * world_size
            cuts = [length * piece // count for piece in range(count + 1)]
            owners = [*range(world_size), *reversed(range(world_size))]
        else:
            cuts = [
                min(max(total * piece // world_size - start, 0), length)
                for piece in range(world_size + 1)
            ]
            owners = list(range(world_size))
        for owner, begin, end in zip(owners, cuts, cuts[1:], strict=False):
            parts = result[owner]
            if begin == end:
                continue
            # The two middle pieces of a zig-zag are neighbours on one rank.
            if parts and (parts[-1].sequence, parts[-1].end) == (sequence, begin):
                begin = parts.pop().begin
            parts.append(Part(sequence, begin, end))
    return tuple(tuple(parts) for parts in result)
