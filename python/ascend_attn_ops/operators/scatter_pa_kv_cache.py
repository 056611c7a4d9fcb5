"""Writes to paged KV caches, and the arithmetic of their slots and layouts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ascend_attn_ops._arguments import (
    check_count,
    check_memory,
    check_tensor,
    dtype_name,
    readable,
    shown,
    wrong,
)
from ascend_attn_ops._operators import Lengths, Operator, lengths_of

_OPERATOR = Operator("scatter_pa_kv_cache_")

# The last axis of a cache in fractal layout ("NZ").
_FRACTAL_BYTES = 32

_SLOT_MAPPING = "ascend::slot_mapping"
_GATHER = "ascend::gather_paged_kv"
_WHOLE_DTYPES = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def scatter_pa_kv_cache_(
    key: Tensor,
    key_cache: Tensor,
    slot_mapping: Tensor,
    value: Tensor | None = None,
    value_cache: Tensor | None = None,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offset: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str = "Norm",
    scatter_mode: str = "None",
    strides: Sequence[int] = (1, 1),
    offsets: Sequence[int] = (0, 0),
) -> None:
    """Write new rows of key and value into a paged cache, in place.

    A cache consists of num_blocks blocks of block_size positions. Slot s is position
    s % block_size of block s // block_size. With the defaults::

        key_cache.flatten(0, 1)[slot_mapping] = key
        value_cache.flatten(0, 1)[slot_mapping] = value

    except that rows with a negative slot are skipped. Copies are bit-exact, and positions that no
    row is written to keep their bytes. On the CPU, an error leaves the caches unchanged.

    ===============  ===============================================================================
    "Norm", "None"   row t of key goes to slot_mapping[t], and row t of value, where it is given.
                     Both may be strided, for instance column slices of a wider tensor
    "PA_NZ"          the same into caches of fractal layout, (num_blocks, N * D / L, block_size, L)
                     with L = 32 bytes: see :func:`nz_cache_shape`. Or in 5 axes, (num_blocks, N,
                     D / L, block_size, L), the same memory. scatter_mode has no effect
    "Norm", "Nct"    as "None", with row t of key read at element offsets[0] + t * strides[0] of the
                     buffer that starts with key (offsets[1] and strides[1] for value)
    "Norm", "Alibi"  for batch b and head h, the last compress_lens rows of the sequence, to
                     consecutive slots from slot_mapping[b * N + h] on
    "Norm", "Rope"   as "Alibi", with all rows, those of the window [o, o + compress_lens) replaced
                     by their mean (accumulated in float32); o is compress_seq_offset
    "Norm", "Omni"   as "Rope", with the rows of the window left out. In both, a compress_seq_offset
                     of -1 or a compress_lens of 0 means no window
    key of rank 4    Ascend 950: "Alibi", "Rope" and "Omni" for sequences padded to S; "None" is
                     "Rope", or without compress_seq_offset "Alibi"
    ===============  ===============================================================================

    The last four write every head to slots of its own, in caches (num_blocks, block_size, 1, D). On
    Ascend 950 with CANN 8.5 and 9.0, and under such limits, cache_mode and scatter_mode have no
    effect; from CANN 9.1 on, "Alibi", "Rope" and "Omni" need a key of rank 4 there.

    Under torch.compile(dynamic=True), the inductor of torch 2.13 confuses two mutated views of one
    buffer, for any operator. If key_cache and value_cache share a buffer, compile with
    dynamic=False. That of torch 2.12 and earlier is wrong about the storage offset of a mutated
    view: pass caches that begin where their storage begins.

    For inference only: no gradient flows through a cache. While grad mode is on, an argument that
    requires grad is an error; call the function under torch.no_grad(), or detach the argument.

    Args:
        key: (T, N, Dk), sequences packed, or (B, S, N, Dk); any strides. On A2 and A3 rows with
            gaps between them are copied first, which the device would otherwise misread. float16,
            bfloat16 or int8; on Ascend 950 also float32, uint8, int16, uint16, int32, uint32,
            float8_e5m2 and float8_e4m3fn.
        key_cache: (num_blocks, block_size, N, Dk), or as above; key's dtype. Contiguous; from CANN
            9.1 on, its blocks may lie apart, as in buffer[:, 0], and outside of "PA_NZ" they may
            hold rows head by head, as in memory.transpose(1, 2). On A2 and A3 of at least T slots.
        slot_mapping: (T,); for Alibi, Rope and Omni (B * N,), for rank 4 (B, N). int32 or int64
            (these modes on A2 and A3: int32). Below num_blocks * block_size, no slot twice.
        value: (T, N, Dv) or (B, S, N, Dv); key's dtype. With a key of int8, float16 or bfloat16,
            "PA_NZ" takes both half types. Rope and Omni: Dv is Dk.
        value_cache: as key_cache, with Dv.
        compress_lens: (B * N,), for rank 4 (B, N); how many rows to keep ("Alibi"), or the length
            of the window.
        compress_seq_offset: (B * N,); first row of the window.
        seq_lens: (B,); rows of each sequence. The sum is T for packed sequences.
        cache_mode: "Norm" or "PA_NZ".
        scatter_mode: "None", "Nct", "Alibi", "Rope" or "Omni".
        strides: "Nct" only: elements from row to row, of key and of value.
        offsets: "Nct" only: elements before the first row, of key and of value.

    Raises:
        TypeError: a dtype is not supported or disagrees.
        ValueError: a shape, index, mode or device limit is violated; a cache has other strides, or
            holds elements of another argument; a cache made in inference mode outside of it.
        NotImplementedError: an argument requires grad; a mode needs a value and there is none; the
            product in force has no such operator.

    Example:
        >>> import torch, ascend_attn_ops
        >>> key_cache = torch.zeros(4, 16, 2, 128, dtype=torch.bfloat16)
        >>> key = torch.randn(3, 2, 128, dtype=torch.bfloat16)
        >>> slots = torch.tensor([17, -1, 18])
        >>> ascend_attn_ops.scatter_pa_kv_cache_(key, key_cache, slots)
        >>> torch.equal(key_cache[1, 1], key[0])
        True

    Source: docs/specification/scatter_pa_kv_cache.md; CANN's document of aclnnScatterPaKvCache.
    """
    call = _OPERATOR.through_torch if is_dynamo_compiling() else _OPERATOR.direct
    return call(
        key, key_cache, slot_mapping, value, value_cache, compress_lens, compress_seq_offset,
        seq_lens, cache_mode, scatter_mode, strides, offsets,
    )  # fmt: skip


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
        >>> import torch
        >>> table = torch.tensor([[7, 2], [5, -1]])
        >>> slot_mapping(table, torch.tensor([[0, 17], [3, -1]]), block_size=16)
        tensor([[112,  33],
                [ 83,  -1]])
    """
    _check_table(block_table, positions)
    block_size = check_count(_SLOT_MAPPING, "block_size", block_size, least=1)
    single = positions.dim() == block_table.dim() - 1
    at = (positions[..., None] if single else positions).long()
    block = torch.div(at.clamp(min=0), block_size, rounding_mode="floor")
    try:
        blocks = block_table.gather(-1, block)
    except (IndexError, RuntimeError):
        _refuse_positions(block_table, at, block_size)
        raise
    dtype = block_table.dtype
    # The first block of which the last slot is beyond the dtype.
    beyond = (torch.iinfo(dtype).max + 1) // block_size
    if blocks.numel() and readable(blocks) and int(blocks.amax()) >= beyond:
        _refuse_blocks(blocks[at >= 0], beyond)
    # In int64, as int32 would wrap unseen on a device.
    slots = torch.add(at.remainder(block_size), blocks, alpha=block_size)
    # In the dtype of the table, which is what the operator and the device want.
    slots = slots.masked_fill((at < 0) | (blocks < 0), -1).to(dtype)
    return slots[..., 0] if single else slots


def _check_table(block_table: Tensor, positions: Tensor) -> None:
    check_tensor(_SLOT_MAPPING, "block_table", block_table)
    check_tensor(_SLOT_MAPPING, "positions", positions)
    check_memory(_SLOT_MAPPING, "block_table", block_table)
    check_memory(_SLOT_MAPPING, "positions", positions)
    if block_table.dtype not in (torch.int32, torch.int64):
        got = dtype_name(block_table.dtype)
        raise wrong(TypeError, _SLOT_MAPPING, "block_table", "dtype int32 or int64", got)
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


def _refuse_positions(block_table: Tensor, at: Tensor, block_size: int) -> None:
    """Where its entries could not be read."""
    size = block_table.shape[-1] * block_size
    if readable(at) and int(at.amax()) >= size:
        expected = f"positions below {size}, in the {block_table.shape[-1]} blocks of {block_size}"
        raise wrong(ValueError, _SLOT_MAPPING, "positions", expected, str(int(at.amax())))


def _refuse_blocks(blocks: Tensor, beyond: int) -> None:
    """Unless it is padding that reads them."""
    if blocks.numel() and int(blocks.amax()) >= beyond:
        expected = f"blocks below {beyond}, whose slots {dtype_name(blocks.dtype)} holds"
        raise wrong(ValueError, _SLOT_MAPPING, "block_table", expected, str(int(blocks.amax())))


def gather_paged_kv(cache: Tensor, block_table: Tensor, lengths: Lengths) -> Tensor:
    """A copy of the rows that sequences have in a paged cache, to look at them.

    The inverse of writing rows to the slots of :func:`slot_mapping`. The operators read the blocks
    where they are, and need no such copy.

    Args:
        cache: (num_blocks, block_size, ...), as (num_blocks, block_size, N, D).
        block_table: (B, M), int32 or int64, on cache's device; entry i of a row is the block with
            the positions [i * block_size, (i + 1) * block_size) of a sequence. Entries behind the
            last row of a sequence are not read.
        lengths: rows of each sequence, B whole numbers as a tensor or a list. They are read on the
            host.

    Returns:
        (T, ...), as (T, N, D): the rows of one sequence behind the other, T the sum of lengths.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: cache has less than 2 axes or blocks without rows, block_table another shape or
            device, a length is negative or beyond the table, or there is no block of that number.

    Example:
        >>> import torch
        >>> cache = torch.arange(8.0).view(4, 2, 1, 1)
        >>> table = torch.tensor([[3, 0], [1, -1]])
        >>> gather_paged_kv(cache, table, [3, 1]).flatten()
        tensor([6., 7., 0., 2.])
    """
    for name, x in (("cache", cache), ("block_table", block_table)):
        check_tensor(_GATHER, name, x)
        check_memory(_GATHER, name, x)
    if cache.dim() < 2 or cache.shape[1] == 0:
        expected = "shape (num_blocks, block_size, ...) with a block_size of at least 1"
        raise wrong(ValueError, _GATHER, "cache", expected, str(list(cache.shape)))
    if block_table.dtype not in (torch.int32, torch.int64):
        got = dtype_name(block_table.dtype)
        raise wrong(TypeError, _GATHER, "block_table", "dtype int32 or int64", got)
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
    rows = []
    for blocks, count in zip(block_table.long(), counts, strict=True):
        used = blocks[: -(-count // block_size)]
        # Not with brackets, where torch crashes if the table is one of its tensors without memory,
        # as forward-mode derivatives have them.
        outside = used.masked_select((used < 0) | (used >= num_blocks))
        if outside.numel():
            expected = f"blocks in [0, {num_blocks})"
            raise wrong(ValueError, _GATHER, "block_table", expected, str(int(outside[0])))
        rows.append(cache.index_select(0, used).flatten(0, 1)[:count])
    return torch.cat(rows) if rows else cache.new_empty(0, *cache.shape[2:])


def nz_cache_shape(
    num_blocks: int, block_size: int, num_heads: int, head_size: int, dtype: torch.dtype
) -> tuple[int, int, int, int]:
    """The shape of a cache for cache_mode "PA_NZ": (num_blocks, N * D / L, block_size, L).

    Raises:
        TypeError: a size is not a whole number, or dtype no dtype.
        ValueError: a size is negative, or head_size is not a multiple of 32 bytes.

    Example:
        >>> nz_cache_shape(10, 128, 8, 64, torch.bfloat16)
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
    """A copy of a cache (num_blocks, block_size, N, D) in the layout of cache_mode "PA_NZ".

    Raises:
        TypeError: cache is not a tensor.
        ValueError: cache has another rank, or D is not a multiple of 32 bytes.
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
    """A copy of a cache of cache_mode "PA_NZ", of 4 axes, as (num_blocks, block_size, N, D).

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
