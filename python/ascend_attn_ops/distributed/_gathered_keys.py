"""The keys that were gathered last.

The indexer, the attention and the loss of a layer read the same keys, which travel once. Each kind
of key has one entry, so that the keys of one layer are kept and no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.compiler import is_compiling

from ascend_attn_ops.distributed._collectives import finish_gather, gather, start_gather

if TYPE_CHECKING:
    from ascend_attn_ops.distributed.shards import SequenceShards


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are one, or one is the other detached.

    Not by the address: tensors without elements share it.
    """
    return x is y or (
        x.untyped_storage()._cdata == y.untyped_storage()._cdata
        and (x.storage_offset(), x.shape, x.stride()) == (y.storage_offset(), y.shape, y.stride())
        and x.dtype == y.dtype
    )


@dataclass
class _Entry:
    local: Tensor  # keeps its memory from being used for other keys
    version: int
    on_the_way: Tensor | None
    arrived: Tensor | None = None


class GatheredKeys:
    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def has(self, kind: str, x: Tensor) -> bool:
        entry = self._entries.get(kind)
        return (
            entry is not None
            and not x.is_inference()
            and same_memory(entry.local, x)
            and entry.version == x._version
        )

    def start(self, shards: SequenceShards, kind: str, x: Tensor) -> None:
        """Begin to gather x, unless that was done already."""
        # A write to an inference tensor would go unnoticed.
        if x.is_inference() or self.has(kind, x):
            return
        self.drop(shards, kind)
        self._entries[kind] = _Entry(x.detach(), x._version, start_gather(shards, x.detach()))

    def take(self, shards: SequenceShards, kind: str, x: Tensor) -> Tensor:
        """Return x of all tokens, and keep it."""
        # Compiled code gathers again: the compiler merges equal collectives by itself.
        if is_compiling() or x.is_inference():
            return gather(shards, x)
        self.start(shards, kind, x)
        entry = self._entries[kind]
        if entry.on_the_way is not None:
            entry.arrived, entry.on_the_way = finish_gather(shards, entry.on_the_way), None
        assert entry.arrived is not None
        return entry.arrived

    def drop(self, shards: SequenceShards, kind: str) -> None:
        entry = self._entries.pop(kind, None)
        if entry is not None and entry.on_the_way is not None:
            finish_gather(shards, entry.on_the_way)

    def clear(self) -> None:
        self._entries.clear()
