"""The tokens of a batch over the ranks of a group, as the user holds them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from copy import copy

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from ascend_attn_ops._core.arguments import (
    INT64_MAX,
    check_count,
    check_memory,
    check_tensor,
    shown,
    wrong,
)
from ascend_attn_ops._core.torch_private import FakeTensor
from ascend_attn_ops.distributed._agreement import Agreement, collective, host_group
from ascend_attn_ops.distributed._layout import Gather, Layout, Order, Part, Ranges, Rows

__all__ = ["Part", "SequenceShards"]

_NAME = "SequenceShards"


class SequenceShards(Layout):
    """How the tokens of packed sequences are spread over the ranks of a group.

    A batch of sequences is one axis of T tokens, one sequence after another, as in layout TND. Each
    rank holds some of the tokens, its *local tokens*, in the order of the batch.

    Making one is a collective call: the ranks compare their arguments.

    Args:
        lengths: tokens of each sequence, in a list or an iterator; any, also 0, and the same on all
            ranks.
        group: the ranks that share the sequences; None for all ranks.
        order: "zigzag" cuts each sequence into two pieces per rank and gives rank r pieces r and
            2P - 1 - r, so that all ranks see equally many keys under a causal mask. "contiguous"
            cuts the T tokens into one piece per rank.
        check_calls: whether the ranks compare the arguments of each call of a distributed function,
            so that a wrong call is an error on all of them. That costs a reduction of a few
            integers between the hosts per call; without it, the other ranks wait for a time-out.

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
        lengths: Iterable[int],
        group: ProcessGroup | None = None,
        order: Order = "zigzag",
        *,
        check_calls: bool = True,
    ) -> None:
        group = group if group is not None else dist.group.WORLD
        if group is None:
            got = "none; call torch.distributed.init_process_group first"
            raise wrong(ValueError, _NAME, "group", "an initialized torch.distributed", got)
        if dist.get_rank(group) < 0:
            expected = "a group with this process in it"
            raise wrong(ValueError, _NAME, "group", expected, "one without")
        self.agreement = Agreement(host_group(group) if check_calls else None)
        self.device_types = frozenset(device.type for device in group._device_types)
        self._share_out(lengths, group, order)

    @collective
    def _share_out(self, lengths: Iterable[int], group: ProcessGroup, order: Order) -> None:
        given = _checked(lengths, order)
        self.agreement.vote(_NAME, {"lengths": given, "order": order})
        super().__init__(given, group, order)

    def _place(self, lengths: tuple[int, ...], parts: Sequence[Sequence[Part]]) -> None:
        super()._place(lengths, parts)
        # Calls that the operators have found right; see `guard`.
        self._checked: set[tuple[object, ...]] = set()
        self._compressed: dict[int, SequenceShards] = {}
        self._ranges: dict[Hashable, Ranges] = {}

    def compressed(self, ratio: int) -> SequenceShards:
        """Return how the compressed keys are spread, each of which stands for `ratio` tokens.

        A rank holds the keys whose last token it holds: a sequence of L tokens has L // ratio keys,
        and key w ends with token (w + 1) * ratio - 1. In the result they are what tokens are here.
        Nothing is communicated. **Under torch.compile, call this once before the compiled code.**

        Args:
            ratio: `cmp_ratio` of the attention, 4 or 128 in DeepSeek-V4.

        Returns:
            The shards of the keys: their `positions() * ratio` are the positions of rotary
            embeddings. The same object for the same ratio.

        Raises:
            TypeError, ValueError: ratio is no positive integer.
            NotImplementedError: the first call for a ratio, under torch.compile.

        Example:
            >>> from ascend_attn_ops.distributed import SequenceShards
            >>> shards = SequenceShards([11, 3]).compressed(4)  # of a group of one rank
            >>> shards.lengths
            (2, 0)
        """
        where = "SequenceShards.compressed"
        ratio = check_count(where, "ratio", ratio, least=1)
        if ratio == 1:
            return self
        if ratio not in self._compressed:
            if is_compiling():
                got = f"{ratio}; call shards.compressed({ratio}) before the compiled code"
                expected = "one that was used before torch.compile"
                raise wrong(NotImplementedError, where, "ratio", expected, got)
            result = copy(self)
            # A part that ends inside of a window leaves the key to who has its last token.
            keys = [
                [Part(x.sequence, x.begin // ratio, x.end // ratio) for x in rows]
                for rows in self._rows
            ]
            result._place(
                tuple(length // ratio for length in self.lengths),
                [[part for part in own if part.begin < part.end] for own in keys],
            )
            self._compressed[ratio] = result
        return self._compressed[ratio]

    def _ranges_around(self, key: Hashable, wanted: Callable[[Rows], tuple[int, int]]) -> Ranges:
        """Tokens around the local parts; `key` stands for what is wanted."""
        found = self._ranges.get(key)
        if found is None:
            found = Ranges(self, wanted)
            if not is_compiling():
                self._ranges[key] = found
        return found

    @collective
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
            TypeError, ValueError, NotImplementedError: x is no dense tensor, its axis has not
                `local_tokens`, or the group has no backend for its device, on any rank. All ranks
                raise the same.
        """
        where = "SequenceShards.unshard"
        check_local(where, "x", x)
        dim = check_count(where, "dim", dim, least=-INT64_MAX - 1)
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != self.local_tokens:
            expected = f"the {self.local_tokens} tokens of this rank on axis {dim}"
            raise wrong(ValueError, where, "x", expected, f"shape {tuple(x.shape)}")
        if x.device.type not in self.device_types:
            types = ", ".join(sorted(self.device_types))
            expected = f"a device that the group communicates on ({types})"
            raise wrong(ValueError, where, "x", expected, str(x.device))
        rows = x.movedim(dim, 0)
        recorded = x.requires_grad and torch.is_grad_enabled()
        facts = {"shape": tuple(rows.shape[1:]), "dtype": str(x.dtype), "gradient": recorded}
        self.agreement.vote(where, facts)
        return Gather.apply(rows, self).movedim(0, dim)

    def __repr__(self) -> str:
        return (
            f"SequenceShards(tokens={self.tokens}, sequences={len(self.lengths)}, "
            f"order={self.order!r}, rank={self.rank}, world_size={self.world_size})"
        )


def check_local(where: str, argument: str, x: object) -> None:
    """Raise unless x is a plain tensor with memory, which can be sent."""
    if not isinstance(x, Tensor) or isinstance(x, (DTensor, FakeTensor)):
        expected = "a tensor of this rank's tokens"
        raise wrong(TypeError, where, argument, expected, type(x).__name__)
    check_tensor(where, argument, x)
    check_memory(where, argument, x)


def _checked(lengths: Iterable[int], order: str) -> tuple[int, ...]:
    if order not in ("zigzag", "contiguous"):
        raise wrong(ValueError, _NAME, "order", "'zigzag' or 'contiguous'", shown(order))
    given = (
        tuple(lengths) if isinstance(lengths, Iterable) and not isinstance(lengths, str) else None
    )
    if given is None or not all(isinstance(n, int) and not isinstance(n, bool) for n in given):
        raise wrong(TypeError, _NAME, "lengths", "a list of integers", shown(lengths))
    if any(n < 0 for n in given):
        raise wrong(ValueError, _NAME, "lengths", "no negative length", shown(list(given)))
    return given
