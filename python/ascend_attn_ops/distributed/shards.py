"""Which tokens of a batch each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup

from ascend_attn_ops._arguments import shown
from ascend_attn_ops.distributed._agreement import agree, host_group
from ascend_attn_ops.distributed._collectives import GatherTokens
from ascend_attn_ops.distributed._gathered_keys import GatheredKeys

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


class SequenceShards:
    """How the tokens of packed sequences are spread over the ranks of a group.

    A batch of sequences is one axis of T tokens, one sequence after another, as in layout TND. Each
    rank holds some of the tokens, its *local tokens*, in the order of the batch.

    Making one is a collective call: the ranks compare their arguments.

    Args:
        lengths: tokens of each sequence; any, also 0, and the same on all ranks.
        group: the ranks that share the sequences; None for all ranks.
        order: "zigzag" cuts each sequence into two pieces per rank and gives rank r pieces r and
            2P - 1 - r, so that all ranks see equally many keys under a causal mask. "contiguous"
            cuts the T tokens into one piece per rank.
        check_calls: whether the ranks compare the arguments of each call of a distributed function,
            so that a wrong call is an error on all of them. That costs a reduction of a few
            integers between the hosts per call; without it, a call that is wrong on some ranks
            alone leaves the others waiting for them until the group's time-out.

    Attributes:
        lengths: tokens of each sequence.
        tokens: T, the tokens of all sequences.
        local_tokens: how many of them this rank holds; it may be none.
        rank: of this process in the group.
        world_size: P, the number of ranks.

    Raises:
        TypeError: lengths are not integers.
        ValueError: a length is negative; the ranks disagree about lengths or order; this process is
            not in the group. All ranks raise the same.

    Example:
        >>> from ascend_attn_ops.distributed import SequenceShards
        >>> shards = SequenceShards([5, 3])  # of a group of one rank
        >>> shards.parts()
        (Part(sequence=0, begin=0, end=5), Part(sequence=1, begin=0, end=3))
        >>> shards.positions().tolist()
        [0, 1, 2, 3, 4, 0, 1, 2]
    """

    def __init__(
        self,
        lengths: Sequence[int],
        group: ProcessGroup | None = None,
        order: Order = "zigzag",
        *,
        check_calls: bool = True,
    ) -> None:
        group = group if group is not None else dist.group.WORLD
        if group is None:
            raise ValueError(
                "SequenceShards: group: expected an initialized torch.distributed, got none; call "
                "torch.distributed.init_process_group first"
            )
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(
                "SequenceShards: group: expected a group with this process in it, got one without"
            )
        self.group, self.order, self.check_calls = group, order, check_calls
        self._group_name = group.group_name
        self._device_types = frozenset(device.type for device in group._device_types)
        self._host_group = host_group(group)
        error: Exception | None = None
        try:
            self.lengths = _checked(lengths, order)
        except (TypeError, ValueError) as wrong:
            self.lengths, error = (), wrong
        agree(self, "SequenceShards", error, {"lengths": self.lengths, "order": order})

        ends = tuple(accumulate(self.lengths))
        self.tokens = ends[-1] if ends else 0
        # Of each sequence, the first token in the batch.
        self._starts = tuple(end - n for end, n in zip(ends, self.lengths, strict=True))
        self._parts = _parts(self.lengths, self._starts, self.world_size, order)
        sizes = [sum(end - begin for _, begin, end in parts) for parts in self._parts]
        self.local_tokens = sizes[self.rank]
        # Collectives want equal sizes: every rank's tokens are padded to this many rows.
        self._width = max(sizes)
        indices = [_batch_tokens(parts, self._starts) for parts in self._parts]
        # Of each token of the batch, its padded row; of each padded row, its token, and 0 where it
        # is padding.
        from_padded = torch.empty(self.tokens, dtype=torch.int64)
        to_padded = torch.zeros(self.world_size * self._width, dtype=torch.int64)
        for rank, index in enumerate(indices):
            rows = rank * self._width + torch.arange(len(index))
            from_padded[index] = rows
            to_padded[rows] = index
        self._indices = {
            ("local", "cpu"): indices[self.rank],
            ("from_padded", "cpu"): from_padded,
            ("to_padded", "cpu"): to_padded,
        }
        self._gathered = GatheredKeys()
        # Calls that the operators have found right; see `check`.
        self._checked: set[tuple[object, ...]] = set()

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
        return x.index_select(dim, self._index("local", x.device))

    def unshard(self, x: Tensor, dim: int = 0) -> Tensor:
        """Collect the tokens of all ranks; the inverse of :meth:`shard`, and a collective call.

        Differentiable: the gradients of all ranks are summed, in float32. A loss that every rank
        computes from the result would count once per rank.

        Args:
            x: a tensor whose axis `dim` is the local tokens.
            dim: the axis of the tokens.

        Returns:
            x with the T tokens of the batch on that axis, on every rank.

        Raises:
            ValueError: the axis has not `local_tokens`, on any rank; x is on a device for which the
                group has no backend. All ranks raise the same.
        """
        error: ValueError | None = None
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != self.local_tokens:
            error = ValueError(
                f"SequenceShards.unshard: x: expected the {self.local_tokens} tokens of this rank "
                f"on axis {dim}, got shape {tuple(x.shape)}"
            )
        elif x.device.type not in self._device_types:
            error = ValueError(
                "SequenceShards.unshard: x: expected a device that the group communicates on "
                f"({', '.join(sorted(self._device_types))}), got {x.device}"
            )
        rest = None if error else tuple(x.movedim(dim, 0).shape[1:])
        agree(self, "SequenceShards.unshard", error, {"shape": rest, "dtype": str(x.dtype)})
        return GatherTokens.apply(x.movedim(dim, 0), self).movedim(0, dim)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Return the position of each local token in its sequence, as rotary embeddings want it.

        Args:
            device: of the result.

        Returns:
            int64, (local_tokens,).
        """
        parts = [torch.arange(begin, end, device=device) for _, begin, end in self.parts()]
        return torch.cat([torch.empty(0, dtype=torch.int64, device=device), *parts])

    def parts(self) -> tuple[Part, ...]:
        """Return what this rank holds, in the order in which it holds it."""
        return self._parts[self.rank]

    def __repr__(self) -> str:
        return (
            f"SequenceShards(tokens={self.tokens}, sequences={len(self.lengths)}, "
            f"order={self.order!r}, rank={self.rank}, world_size={self.world_size})"
        )

    def _index(self, name: str, device: torch.device) -> Tensor:
        """Token numbers, on a device; copied there once."""
        index = self._indices.get((name, str(device)))
        if index is None:
            index = self._indices[name, "cpu"].to(device)
            if not is_compiling():
                self._indices[name, str(device)] = index
        return index


def _checked(lengths: Sequence[int], order: str) -> tuple[int, ...]:
    if order not in ("zigzag", "contiguous"):
        got = shown(order)
        raise ValueError(f"SequenceShards: order: expected 'zigzag' or 'contiguous', got {got}")
    if (
        isinstance(lengths, str)
        or not hasattr(lengths, "__iter__")
        or not all(isinstance(n, int) and not isinstance(n, bool) for n in lengths)
    ):
        got = shown(lengths)
        raise TypeError(f"SequenceShards: lengths: expected a list of integers, got {got}")
    if any(n < 0 for n in lengths):
        raise ValueError(
            f"SequenceShards: lengths: expected no negative length, got {list(lengths)}"
        )
    return tuple(lengths)


def _parts(
    lengths: tuple[int, ...], starts: tuple[int, ...], world_size: int, order: str
) -> tuple[tuple[Part, ...], ...]:
    """What each rank holds."""
    result: list[list[Part]] = [[] for _ in range(world_size)]
    total = sum(lengths)
    for sequence, (start, length) in enumerate(zip(starts, lengths, strict=True)):
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


def _batch_tokens(parts: tuple[Part, ...], starts: tuple[int, ...]) -> Tensor:
    """The tokens of parts, counted from the first of the batch."""
    ranges = [torch.arange(starts[s] + begin, starts[s] + end) for s, begin, end in parts]
    return torch.cat([torch.empty(0, dtype=torch.int64), *ranges])
