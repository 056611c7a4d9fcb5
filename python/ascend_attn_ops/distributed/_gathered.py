"""The keys that a rank has gathered, kept for the next operator of a layer."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ascend_attn_ops.distributed._layout import Layout


@dataclass
class _Entry:
    local: Tensor  # keeps its memory from being used for other keys
    version: int
    dtype: torch.dtype  # in which they travel
    rows: Tensor
    arrived: bool = False

    def wait(self, layout: Layout) -> Tensor:
        if not self.arrived:
            self.rows, self.arrived = layout.finish_gather(self.rows), True
        return self.rows


class GatheredKeys:
    """The keys that were gathered last.

    The indexer, the attention and the loss of a layer read the same keys, which travel once. Each
    kind of key has one entry, so that the keys of one layer are kept and no more.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        # torch keeps the tensors of a collective until something waits for it. Keys may be
        # prefetched for a call that never comes.
        weakref.finalize(self, _finish, self._entries).atexit = False

    def has(self, kind: str, x: Tensor, dtype: torch.dtype) -> bool:
        entry = self._entries.get(kind)
        if entry is None or x.is_inference():
            return False
        # Not by the address: tensors without elements share it.
        found, wanted = (
            (y.untyped_storage()._cdata, y.storage_offset(), y.shape, y.stride(), y.dtype)
            for y in (entry.local, x)
        )
        return found == wanted and (entry.version, entry.dtype) == (x._version, dtype)

    def start(self, layout: Layout, kind: str, x: Tensor, sent: Tensor) -> None:
        """Begin to gather `sent`, which is x in its dtype of the call, unless that was done."""
        if self.has(kind, x, sent.dtype):
            return
        self.drop(layout, kind)
        rows = layout.start_gather(sent.detach())
        # A write to an inference tensor would go unnoticed: this call alone may use its rows.
        version = -1 if x.is_inference() else x._version
        self._entries[kind] = _Entry(x.detach(), version, sent.dtype, rows)

    def take(self, layout: Layout, kind: str, x: Tensor) -> Tensor:
        """Return x of all tokens: what `start` began to gather, which is kept."""
        # Compiled code gathers again: the compiler merges equal collectives by itself.
        entry = None if is_compiling() else self._entries.get(kind)
        return layout.gather(x) if entry is None else entry.wait(layout)

    def drop(self, layout: Layout, kind: str) -> None:
        entry = self._entries.pop(kind, None)
        if entry is not None:
            entry.wait(layout)


def _finish(entries: dict[str, _Entry]) -> None:
    for entry in entries.values():
        if not entry.arrived:
            torch.ops._c10d_functional.wait_tensor(entry.rows)
