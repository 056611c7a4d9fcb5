"""The placements of a call: which axis each mesh dimension shards, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ascend_attn_ops._core.arguments import wrong
from ascend_attn_ops._core.torch_private import DTensorSpec
from ascend_attn_ops.distributed.dtensor._axes import ABSENT, PER_SEQUENCE, Axes

_WHOLE = Replicate()


@dataclass(frozen=True, init=False)  # torch's class is one of C++, which begins its objects
class HeadsOfSequences(Placement):
    """The statistics of flash_attention_score in layout TND, sharded by heads.

    Each rank has (T1, N / ranks, 8), stored as (N / ranks, Sq, 8) of one sequence after another,
    which its backward reads. No Shard() says that: torch refuses to redistribute it.
    """


class Part(NamedTuple):
    """A rank's part of an axis."""

    begin: int
    size: int

    @property
    def end(self) -> int:
        return self.begin + self.size


def part_of(size: int, splits: Iterable[tuple[int, int]]) -> Part:
    """The part left of an axis after `splits` into (ranks, the coordinate among them)."""
    begin = 0
    for ranks, coordinate in splits:
        chunk = -(-size // ranks)
        first = min(coordinate * chunk, size)
        begin, size = begin + first, min(chunk, size - first)
    return Part(begin, size)


class Tensors(NamedTuple):
    """The tensors of one argument: one, or those of a list."""

    argument: str
    axes: str
    specs: Sequence[DTensorSpec]
    written: bool


class Choice:
    """The axis that each mesh dimension shards; None where all ranks compute the same."""

    def __init__(
        self, operator: str, axes: Axes, mesh: DeviceMesh, tensors: Sequence[Tensors]
    ) -> None:
        self.operator, self.axes, self.mesh = operator, axes, mesh
        self.sharded: list[str | None] = []
        for dim in range(mesh.ndim):
            self.sharded.append(self._cheapest(dim, tensors))

    def ranks(self, axis: str) -> int:
        """Among how many ranks an axis is divided."""
        dims = (dim for dim, sharded in enumerate(self.sharded) if sharded == axis)
        return math.prod(self.mesh.size(dim) for dim in dims)

    @property
    def key_heads_sharded(self) -> bool:
        return self._key_heads_sharded(self.ranks("N"))

    def inputs(self, letters: str, absent: Placement = _WHOLE) -> tuple[Placement, ...]:
        """The placements of a tensor with these axes; `absent` where a sharded axis is not its."""
        key_heads = self.key_heads_sharded
        return tuple(
            self._wanted(letters, axis, key_heads) or (_WHOLE if axis is None else absent)
            for axis in self.sharded
        )

    def outputs(self, letters: str) -> tuple[Placement, ...]:
        return self.inputs(letters, _WHOLE if letters == ABSENT else Partial("sum"))

    def part(self, axis: str, coordinate: Sequence[int]) -> Part:
        dims = [dim for dim, sharded in enumerate(self.sharded) if sharded == axis]
        splits = ((self.mesh.size(dim), coordinate[dim]) for dim in dims)
        return part_of(self.axes.sizes[axis], splits)

    def local_shape(
        self, shape: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
    ) -> list[int]:
        local = list(shape)
        for dim, placement in enumerate(placements):
            axis = placement.dim if isinstance(placement, Shard) else None
            # Declared (T1, N, 8).
            axis = 1 if isinstance(placement, HeadsOfSequences) else axis
            if axis is not None:
                split = (self.mesh.size(dim), coordinate[dim])
                local[axis] = part_of(local[axis], [split]).size
        return local

    def _wanted(self, letters: str, axis: str | None, key_heads: bool) -> Placement | None:
        """Returns the placement that shards an axis; None if the tensor does not have the axis."""
        if axis is None:
            return None
        if axis == "N" and letters == PER_SEQUENCE:
            return HeadsOfSequences()
        if axis == "N" and "N" not in letters and key_heads:
            axis = "K"
        return Shard(letters.index(axis)) if axis in letters else None

    def _key_heads_sharded(self, ranks: int) -> bool:
        """Otherwise all ranks have all key heads, and take those of their query heads."""
        heads = self.axes.sizes.get("K", 0)
        return heads > 1 and (heads % ranks == 0 or not self.axes.even)

    def _divisible(self, axis: str, ranks: int) -> bool:
        if axis != "N" or not self.axes.even:
            return True
        heads, key_heads = self.axes.sizes["N"], self.axes.sizes["K"]
        whole = key_heads % ranks == 0 or ranks % key_heads == 0
        return heads % ranks == 0 and whole

    def _cheapest(self, dim: int, tensors: Sequence[Tensors]) -> str | None:
        current = [spec.placements[dim] for each in tensors for spec in each.specs]
        if all(placement.is_replicate() for placement in current):
            return None
        ranks = self.mesh.size(dim)
        options = []
        for order, axis in enumerate([*self.axes.shardable, None]):
            idle = 0.0 if axis is None else self._idle(axis, ranks)
            if axis is not None and not self._divisible(axis, ranks * self.ranks(axis)):
                continue
            key_heads = self._key_heads_sharded(ranks * self.ranks("N"))
            cost = 0.0
            for each in tensors:
                wanted = self._wanted(each.axes, axis, key_heads) or _WHOLE
                cost += sum(_cost(spec, dim, wanted, each.written) for spec in each.specs)
            # All ranks computing the same is the last choice among equals.
            options.append((cost, axis is None, idle, order, axis))
        best = min(options, key=lambda option: option[:4])
        if best[0] == math.inf:
            self._refuse(dim, tensors, [option[4] for option in options])
        return best[4]

    def _idle(self, axis: str, ranks: int) -> float:
        """How much longer the largest part takes than an equal one would."""
        size = self.axes.sizes[axis]
        return -(-size // ranks) * ranks / size if size else 1.0

    def _refuse(
        self, dim: int, tensors: Sequence[Tensors], options: Sequence[str | None]
    ) -> NoReturn:
        """Raise for an argument that cannot be moved to a placement of any option."""
        key_heads = self._key_heads_sharded(self.mesh.size(dim) * self.ranks("N"))
        fixed = [x for x in tensors if any(_is_fixed(spec, x.written) for spec in x.specs)]
        for each in fixed:
            got = each.specs[0].placements[dim]
            allowed = [self._wanted(each.axes, x, key_heads) or _WHOLE for x in options]
            if got not in allowed:
                break
        else:
            # Each is right by itself, but they disagree.
            allowed = [fixed[0].specs[0].placements[dim]]
        reason = (
            "since what is written in place is not redistributed"
            if each.written
            else "since statistics of one sequence after another are not redistributed"
        )
        expected = f"{' or '.join(dict.fromkeys(map(repr, allowed)))}, {reason}"
        where = f"ascend::{self.operator}"
        raise wrong(ValueError, where, each.argument, expected, repr(got))


def _is_fixed(spec: DTensorSpec, written: bool) -> bool:
    return written or HeadsOfSequences() in spec.placements


def _cost(spec: DTensorSpec, dim: int, wanted: Placement, written: bool) -> float:
    """Bytes that each rank receives, near enough to compare."""
    current = spec.placements[dim]
    if current == wanted:
        return 0
    if _is_fixed(spec, written):
        return math.inf
    meta = spec.tensor_meta
    assert meta is not None
    size = math.prod(map(int, meta.shape)) * meta.dtype.itemsize
    if current.is_replicate():
        return 0
    if current.is_partial():
        return size if isinstance(wanted, Shard) else 2 * size
    return size / spec.mesh.size(dim) if isinstance(wanted, Shard) else size
