"""The tokens of a batch over the ranks of a group, as the user holds them."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ascend_attn_ops._arguments import shown
from ascend_attn_ops.distributed._agreement import agree, host_group
from ascend_attn_ops.distributed._communication import GatheredKeys, GatherTokens
from ascend_attn_ops.distributed._layout import Layout, Order


class SequenceShards(Layout):
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
        if dist.get_rank(group) < 0:
            raise ValueError(
                "SequenceShards: group: expected a group with this process in it, got one without"
            )
        self.hosts = host_group(group) if check_calls else None
        self.device_types = frozenset(device.type for device in group._device_types)
        error: Exception | None = None
        given: tuple[int, ...] = ()
        try:
            given = _checked(lengths, order)
        except (TypeError, ValueError) as wrong:
            error = wrong
        agree(self.hosts, "SequenceShards", error, {"lengths": given, "order": order})
        super().__init__(given, group, order)
        self._gathered = GatheredKeys()
        # Calls that the operators have found right; see `guard`.
        self._checked: set[tuple[object, ...]] = set()

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
        elif x.device.type not in self.device_types:
            error = ValueError(
                "SequenceShards.unshard: x: expected a device that the group communicates on "
                f"({', '.join(sorted(self.device_types))}), got {x.device}"
            )
        rest = None if error else tuple(x.movedim(dim, 0).shape[1:])
        agree(self.hosts, "SequenceShards.unshard", error, {"shape": rest, "dtype": str(x.dtype)})
        return GatherTokens.apply(x.movedim(dim, 0), self).movedim(0, dim)

    def __repr__(self) -> str:
        return (
            f"SequenceShards(tokens={self.tokens}, sequences={len(self.lengths)}, "
            f"order={self.order!r}, rank={self.rank}, world_size={self.world_size})"
        )


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
