"""The caches of flash_attn_with_kvcache: where their rows are, what is written, what is read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ascend_attn_ops import _flash_conventions as conventions
from ascend_attn_ops.scatter_pa_kv_cache import scatter_pa_kv_cache_, slot_mapping


class Cache(NamedTuple):
    """The keys and values of a batch.

    Attributes:
        function: its name, for errors.
        k, v: (blocks, slots of a block, nheads_k, headdim).
        table: (batch_size, blocks of a sequence); None where block b is all of sequence b, which
            then is read where it lies.
        lengths: what is valid of each sequence, the new keys included.
    """

    function: str
    k: Tensor
    v: Tensor
    table: Tensor | None
    lengths: list[int]

    def append(self, k: Tensor, v: Tensor, begin: int | Tensor) -> None:
        """Write k and v in place, from position `begin` of each sequence on."""
        batch, new = k.shape[:2]
        device = k.device
        table = self.table
        if table is None:
            table = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
        positions = torch.arange(new, dtype=torch.int32, device=device).expand(batch, new)
        positions = positions + (begin.to(device)[:, None] if isinstance(begin, Tensor) else begin)
        slots = slot_mapping(table, positions, self.k.shape[1])
        scatter_pa_kv_cache_(k.flatten(0, 1), self.k, slots.flatten(), v.flatten(0, 1), self.v)

    def attend(
        self,
        q: Tensor,
        mask: conventions.Mask,
        slopes: Tensor | None,
        scale: float | None,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """out (batch_size, seqlen_q, nheads, headdim) and lse (batch_size, nheads, seqlen_q)."""
        function, k, v, table, lengths = self
        batch, queries, _, _ = q.shape
        if table is not None:
            k, v = conventions.from_blocks(function, k, v, table, lengths)
        elif k.shape[0] != batch:
            k, v = k[:batch], v[:batch]
        longest = max(lengths) if lengths else 0
        if lengths.count(longest) == batch:
            if longest != k.shape[1]:
                k, v = k[:, :longest], v[:, :longest]
            return conventions.attend(function, q, k, v, mask, slopes, scale, 0.0, return_lse)
        out, lse = conventions.attend_packed(
            function, q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1),
            conventions.multiples(queries, batch), conventions.multiples(k.shape[1], batch),
            mask, slopes, scale, 0.0, return_lse, lengths,
        )  # fmt: skip
        return out.unflatten(0, (batch, queries)), conventions.by_batch(lse, batch)

    def to_meta(self) -> Cache:
        table = None if self.table is None else self.table.to("meta")
        return self._replace(k=self.k.to("meta"), v=self.v.to("meta"), table=table)


def table_of(
    function: str, batch: int, cache_batch_idx: Tensor | None, block_table: Tensor | None
) -> Tensor | None:
    """The blocks of each sequence: without block_table, one row of the cache."""
    if cache_batch_idx is None:
        return block_table
    if block_table is not None:
        raise ValueError(
            f"{function}: cache_batch_idx: expected None beside block_table, got a tensor"
        )
    if list(cache_batch_idx.shape) != [batch]:
        raise ValueError(
            f"{function}: cache_batch_idx: expected shape ({batch},), one row of the cache for "
            f"each sequence, got {list(cache_batch_idx.shape)}"
        )
    return cache_batch_idx[:, None]


def lengths_of(
    function: str, batch: int, slots: int, new: int, cache_seqlens: int | Tensor | None
) -> list[int]:
    """What each sequence holds with its new keys."""
    if cache_seqlens is None:
        if new:
            raise ValueError(
                f"{function}: cache_seqlens: expected where k and v are written, got None"
            )
        return [slots] * batch
    if isinstance(cache_seqlens, Tensor):
        lengths = conventions.counts(function, "cache_seqlens", cache_seqlens, batch)
    elif isinstance(cache_seqlens, int):
        lengths = [cache_seqlens] * batch
    else:
        raise TypeError(
            f"{function}: cache_seqlens: expected an int or a tensor, "
            f"got {type(cache_seqlens).__name__}"
        )
    for length in lengths:
        if not 0 <= length <= slots - new:
            raise ValueError(
                f"{function}: cache_seqlens: expected 0..{slots - new}, as a sequence has {slots} "
                f"slots, {new} of them for k, got {length}"
            )
    return [length + new for length in lengths]
