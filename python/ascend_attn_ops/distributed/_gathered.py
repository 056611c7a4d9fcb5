"""Keys that travel to all ranks ahead of the calls that read them."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ascend_attn_ops.distributed._layout import Layout


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
