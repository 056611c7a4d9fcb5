"""Pages: paged KV caches, their block tables, slots and layouts.

A cache is (num_blocks, block_size, ...). Entry i of a sequence's row in a block table is the block
with its positions [i * block_size, (i + 1) * block_size); slot s of a cache is position
s % block_size of block s // block_size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import (
    check_count,
    check_memory,
    check_tensor,
    dtype_name,
    readable,
    shown,
    wrong,
)
from ascend_attn_ops._core.packing import Lengths, lengths_of, lengths_tensor

# The last axis of a cache in fractal layout ("NZ").
_FRACTAL_BYTES = 32

_SLOT_MAPPING = "ascend::slot_mapping"
_GATHER = "ascend::gather_paged_kv"
_WHOLE_DTYPES = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def slot_mapping(block_table: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """The slots of tokens in a paged cache.

    Args:
        block_table: (..., M), int32 or int64; entry i is the block with the positions
            [i * block_size, (i + 1) * block_size) of a sequence; negative where none is allocated.
        positions: (..., S) for S tokens of each sequence, or (...) for one; integers on
            block_table's device. Below M * block_size; negative ones are padding.
        block_size: positions per block.

    Returns:
        The shape of positions, the dtype of block_table; -1, which :func:`scatter_pa_kv_cache_`
        skips, for padding and for blocks that are not allocated.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: block_table and positions disagree in their batches or devices, block_size is
            less than 1; on the CPU also a position beyond the table, and a block whose slots the
            dtype of block_table does not hold.

    Example:
        >>> import torch, ascend_attn_ops
        >>> table = torch.tensor([[7, 2], [5, -1]])
        >>> ascend_attn_ops.slot_mapping(table, torch.tensor([[0, 17], [3, -1]]), block_size=16)
        tensor([[112,  33],
                [ 83,  -1]])
    """
    _check_table(block_table, positions)
    block_size = check_count(_SLOT_MAPPING, "block_size", block_size, least=1)
    single = positions.dim() == block_table.dim() - 1
    at = (positions[..., None] if single else positions).long()
    blocks_of_row, dtype = block_table.shape[-1], block_table.dtype
    room = blocks_of_row * block_size
    # Made first, since memory for it ends soon for a view of more elements than anybody reads.
    block = torch.div(at.clamp(min=0), block_size, rounding_mode="floor")
    if readable(at) and at.numel() and int(at.amax()) >= room:
        expected = f"positions below {room}, in the {blocks_of_row} blocks of {block_size}"
        raise wrong(ValueError, _SLOT_MAPPING, "positions", expected, str(int(at.amax())))
    # A table without blocks has rows of padding alone.
    blocks = block_table.gather(-1, block) if blocks_of_row else torch.full_like(block, -1)
    # The first block of which the last slot is beyond the dtype. Padding reads none.
    beyond = (torch.iinfo(dtype).max + 1) // block_size
    if readable(blocks) and blocks.numel() and int(blocks.amax()) >= beyond:
        read = blocks[(at >= 0) & (blocks >= beyond)]
        if len(read):
            expected = f"blocks below {beyond}, whose slots {dtype_name(dtype)} holds"
            raise wrong(ValueError, _SLOT_MAPPING, "block_table", expected, str(int(read[0])))
    # In int64, as int32 would wrap unseen on a device.
    slots = torch.add(at.remainder(block_size), blocks, alpha=block_size)
    # In the dtype of the table, which is what the operator and the device want.
    slots = slots.masked_fill((at < 0) | (blocks < 0), -1).to(dtype)
    return slots[..., 0] if single else slots


def _check_table(block_table: Tensor, positions: Tensor) -> None:
    check_indices(_SLOT_MAPPING, "block_table", block_table)
    check_tensor(_SLOT_MAPPING, "positions", positions)
    check_memory(_SLOT_MAPPING, "positions", positions)
    if positions.dtype not in _WHOLE_DTYPES:
        got = dtype_name(positions.dtype)
        raise wrong(TypeError, _SLOT_MAPPING, "positions", "an integer dtype", got)
    if positions.device != block_table.device:
        expected = f"device {block_table.device} (block_table's)"
        raise wrong(ValueError, _SLOT_MAPPING, "positions", expected, str(positions.device))
    batches, given = block_table.shape[:-1], positions.shape
    if block_table.dim() == 0:
        expected = "at least one axis, (..., M)"
        raise wrong(ValueError, _SLOT_MAPPING, "block_table", expected, "none")
    if batches not in (given, given[:-1]):
        lead = "".join(f"{size}, " for size in batches)
        expected = f"shape ({lead}S), or {tuple(batches)} for one token of each sequence"
        raise wrong(ValueError, _SLOT_MAPPING, "positions", expected, str(list(given)))


def gather_paged_kv(cache: Tensor, block_table: Tensor, lengths: Lengths) -> Tensor:
    """A copy of the rows that sequences have in a paged cache, to look at them.

    The inverse of writing rows to the slots of :func:`slot_mapping`. The operators read the blocks
    where they are, and need no such copy.

    Args:
        cache: (num_blocks, block_size, ...), as (num_blocks, block_size, N, D).
        block_table: (B, M), as in :func:`slot_mapping`, on cache's device. Entries behind the last
            row of a sequence are not read.
        lengths: rows of each sequence, B whole numbers as a tensor or a list, read on the host.

    Returns:
        (T, ...), as (T, N, D): the rows of one sequence behind the other, T the sum of lengths.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: cache has less than 2 axes or blocks without rows, block_table another shape or
            device, a length is negative or beyond the table, or there is no block of that number.

    Example:
        >>> import torch, ascend_attn_ops
        >>> cache = torch.arange(8.0).view(4, 2, 1, 1)
        >>> table = torch.tensor([[3, 0], [1, -1]])
        >>> ascend_attn_ops.gather_paged_kv(cache, table, [3, 1]).flatten()
        tensor([6., 7., 0., 2.])
    """
    check_tensor(_GATHER, "cache", cache)
    check_memory(_GATHER, "cache", cache)
    if cache.dim() < 2 or cache.shape[1] == 0:
        expected = "shape (num_blocks, block_size, ...) with a block_size of at least 1"
        raise wrong(ValueError, _GATHER, "cache", expected, str(list(cache.shape)))
    check_indices(_GATHER, "block_table", block_table)
    if block_table.device != cache.device:
        expected = f"device {cache.device} (cache's)"
        raise wrong(ValueError, _GATHER, "block_table", expected, str(block_table.device))
    if not hasattr(lengths, "__iter__"):
        expected = "whole numbers, as a list or a tensor"
        raise wrong(TypeError, _GATHER, "lengths", expected, shown(lengths))
    counts = list(lengths_of(lengths, where=(_GATHER, "lengths")) or ())
    if block_table.dim() != 2 or len(block_table) != len(counts):
        expected = f"shape ({len(counts)}, M), for as many sequences as lengths"
        raise wrong(ValueError, _GATHER, "block_table", expected, str(list(block_table.shape)))
    num_blocks, block_size = cache.shape[:2]
    room = block_table.shape[1] * block_size
    counts = [check_count(_GATHER, "lengths", count, most=room) for count in counts]
    if block_table._is_zerotensor():
        # torch's zeros without memory, as forward-mode derivatives have them.
        block_table = block_table.clone()
    check_blocks(_GATHER, block_table.cpu(), counts, block_size, num_blocks)
    rows = []
    for blocks, count in zip(block_table.long(), counts, strict=True):
        used = blocks[: -(-count // block_size)]
        rows.append(cache.index_select(0, used).flatten(0, 1)[:count])
    return torch.cat(rows) if rows else cache.new_empty(0, *cache.shape[2:])


def check_indices(function: str, argument: str, indices: Any, rank: int | None = None) -> None:
    check_tensor(function, argument, indices)
    if indices.dtype not in (torch.int32, torch.int64):
        got = dtype_name(indices.dtype)
        raise wrong(TypeError, function, argument, "dtype int32 or int64", got)
    if rank is not None and indices.dim() != rank:
        raise wrong(ValueError, function, argument, f"rank {rank}", str(list(indices.shape)))
    check_memory(function, argument, indices)


def gather_keys_and_values(
    function: str, k: Tensor, v: Tensor, table: Tensor, lengths: Lengths
) -> tuple[Tensor, Tensor]:
    """The blocks of each sequence side by side, (batch_size, slots, nheads_k, headdim), as many as
    the longest sequence has; all of the table where lengths are on a device."""
    check_indices(function, "block_table", table, 2)
    num_blocks, size = k.shape[:2]
    counts = lengths_tensor(lengths)
    assert counts is not None
    batch, blocks = counts.shape[0], table.shape[1]
    if readable(counts):
        longest = int(counts.max()) if batch else 0
        blocks = -(-longest // size) if size else 0
    if table.shape[0] != batch or table.shape[1] < blocks:
        expected = (
            f"shape ({batch}, {blocks}), batch_size and the blocks of {size} for the keys of the "
            "longest sequence, or with more columns"
        )
        raise wrong(ValueError, function, "block_table", expected, str(list(table.shape)))
    table = table[:, :blocks]
    check_blocks(function, table, counts, size, num_blocks)
    if v.shape[:2] != k.shape[:2]:
        expected = f"the {num_blocks} blocks of {size} that the keys have"
        raise wrong(ValueError, function, "v", expected, str(list(v.shape)))
    # Entries after the last block of a sequence are often -1.
    table = table.clamp(0, max(num_blocks - 1, 0))
    return k[table].flatten(1, 2), v[table].flatten(1, 2)


def check_blocks(
    function: str, table: Tensor, lengths: Lengths, block_size: int, num_blocks: int
) -> None:
    """Checks the blocks that sequences read, without waiting for a device."""
    counts = lengths_tensor(lengths)
    assert counts is not None
    if not (readable(table) and readable(counts)):
        return
    first = torch.arange(table.shape[1], device="cpu") * block_size
    outside = table[(first < counts[:, None]) & ((table < 0) | (table >= num_blocks))]
    if len(outside):
        expected = f"0..{num_blocks - 1} where a sequence has keys"
        raise wrong(ValueError, function, "block_table", expected, str(int(outside[0])))


def nz_cache_shape(
    num_blocks: int, block_size: int, num_heads: int, head_size: int, dtype: torch.dtype
) -> tuple[int, int, int, int]:
    """The shape of a cache for cache_mode "PA_NZ".

    Args:
        num_blocks, block_size, num_heads, head_size: of the cache (num_blocks, block_size, N, D).
        dtype: of the cache.

    Returns:
        (num_blocks, N * D / L, block_size, L), where L elements have 32 bytes.

    Raises:
        TypeError: a size is not a whole number, or dtype no dtype.
        ValueError: a size is negative, or head_size is not a multiple of 32 bytes.

    Example:
        >>> import torch, ascend_attn_ops
        >>> ascend_attn_ops.nz_cache_shape(10, 128, 8, 64, torch.bfloat16)
        (10, 32, 128, 16)
    """
    function = "ascend::nz_cache_shape"
    num_blocks = check_count(function, "num_blocks", num_blocks)
    block_size = check_count(function, "block_size", block_size)
    num_heads = check_count(function, "num_heads", num_heads)
    head_size = check_count(function, "head_size", head_size)
    if not isinstance(dtype, torch.dtype):
        raise wrong(TypeError, function, "dtype", "a torch.dtype", shown(dtype))
    last = _FRACTAL_BYTES // dtype.itemsize
    if head_size % last:
        expected = f"a multiple of {last} ({_FRACTAL_BYTES} bytes of {dtype})"
        raise wrong(ValueError, function, "head_size", expected, str(head_size))
    return num_blocks, num_heads * head_size // last, block_size, last


def nd_to_nz(cache: Tensor) -> Tensor:
    """A copy of a cache in the layout of cache_mode "PA_NZ".

    Args:
        cache: (num_blocks, block_size, N, D).

    Returns:
        The shape of :func:`nz_cache_shape`.

    Raises:
        TypeError: cache is not a tensor.
        ValueError: cache has another rank, or D is not a multiple of 32 bytes.

    Example:
        >>> import torch, ascend_attn_ops
        >>> cache = torch.arange(64.0).view(1, 2, 2, 16)
        >>> nz = ascend_attn_ops.nd_to_nz(cache)  # eight elements of float32 are 32 bytes
        >>> nz[0, :, 0, 0].tolist()
        [0.0, 8.0, 16.0, 24.0]
    """
    check_tensor("ascend::nd_to_nz", "cache", cache, 4, "(num_blocks, block_size, N, D)")
    check_memory("ascend::nd_to_nz", "cache", cache)
    num_blocks, block_size, num_heads, head_size = cache.shape
    if head_size * cache.itemsize % _FRACTAL_BYTES:
        expected = f"D of a multiple of {_FRACTAL_BYTES} bytes"
        got = f"{list(cache.shape)} of {dtype_name(cache.dtype)}"
        raise wrong(ValueError, "ascend::nd_to_nz", "cache", expected, got)
    shape = nz_cache_shape(num_blocks, block_size, num_heads, head_size, cache.dtype)
    rows = cache.reshape(num_blocks, block_size, shape[1], shape[3])
    return rows.transpose(1, 2).contiguous()


def nz_to_nd(cache: Tensor, num_heads: int) -> Tensor:
    """A copy of a cache of cache_mode "PA_NZ" as before :func:`nd_to_nz`.

    Args:
        cache: of the shape of :func:`nz_cache_shape`.
        num_heads: N.

    Returns:
        (num_blocks, block_size, N, D).

    Raises:
        TypeError: cache is not a tensor, or num_heads not a whole number.
        ValueError: cache has another shape, or not so many heads.
    """
    function = "ascend::nz_to_nd"
    axes = f"(num_blocks, N * D / L, block_size, L) with L = {_FRACTAL_BYTES} bytes"
    check_tensor(function, "cache", cache, 4, axes)
    check_memory(function, "cache", cache)
    num_heads = check_count(function, "num_heads", num_heads, least=1)
    if cache.shape[3] * cache.itemsize != _FRACTAL_BYTES:
        got = f"{list(cache.shape)} of {dtype_name(cache.dtype)}"
        raise wrong(ValueError, function, "cache", f"shape {axes}", got)
    if cache.shape[1] % num_heads:
        expected = f"a divisor of N * D / L = {cache.shape[1]}"
        raise wrong(ValueError, function, "num_heads", expected, str(num_heads))
    return cache.transpose(1, 2).flatten(2).unflatten(2, (num_heads, -1)).contiguous()
