"""The caches of flash_attn_with_kvcache: where their rows are, what is written, what is read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ascend_attn_ops import _flash_conventions as conventions
from ascend_attn_ops._operators import lengths_on
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
        positions = torch.arange(new, dtype=torch.int32, device=device).expand(batch, new)
        if isinstance(begin, Tensor):
            # A plain copy of a tensor on the CPU would wait for the device.
            on_device = begin if begin.device == device else lengths_on(begin.tolist(), k)
            assert on_device is not None
            begin = on_device[:, None]
        positions = positions + begin
        size = self.k.shape[1]
        if self.table is None:
            slots = positions + torch.arange(0, batch * size, size, device=device)[:, None]
        else:
            slots = slot_mapping(self.table, positions, size)
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
        table = self.table
        if table is not None and not table.is_cpu:  # on the CPU its values are checked
            table = table.to("meta")
        return self._replace(k=self.k.to("meta"), v=self.v.to("meta"), table=table)


def table_of(
    function: str,
    batch: int,
    rows: int,
    cache_batch_idx: Tensor | None,
    block_table: Tensor | None,
) -> Tensor | None:
    """The blocks of each sequence: without block_table, one row of the cache."""
    if cache_batch_idx is None:
        assert block_table is not None
        conventions.check_indices(function, "block_table", block_table, 2)
        return block_table
    if block_table is not None:
        raise ValueError(
            f"{function}: cache_batch_idx: expected None beside block_table, got a tensor"
        )
    conventions.check_indices(function, "cache_batch_idx", cache_batch_idx, 1)
    if list(cache_batch_idx.shape) != [batch]:
        raise ValueError(
            f"{function}: cache_batch_idx: expected shape ({batch},), one row of the cache for "
            f"each sequence, got {list(cache_batch_idx.shape)}"
        )
    beyond = (cache_batch_idx < 0) | (cache_batch_idx >= rows)
    if conventions.readable(beyond) and bool(beyond.any()):
        raise ValueError(
            f"{function}: cache_batch_idx: expected 0..{rows - 1}, got {cache_batch_idx.tolist()}"
        )
    return cache_batch_idx[:, None]


def check_new(function: str, batch: int, k: Tensor, v: Tensor) -> None:
    """What the flat rows of an append no longer show."""
    for name, x, tokens in (("k", k, k.shape[1]), ("v", v, k.shape[1])):
        if x.shape[:2] != (batch, tokens):
            raise ValueError(
                f"{function}: {name}: expected shape ({batch}, {tokens}, nheads_k, headdim), as "
                f"q and k have it, got {list(x.shape)}"
            )


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
