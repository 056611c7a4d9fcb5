"""Writes to paged KV caches."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ascend_attn_ops._core.arguments import shown, wrong
from ascend_attn_ops._core.operators import Operator

_OPERATOR = Operator("scatter_pa_kv_cache_")


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

    For inference only: while grad mode is on, an argument that requires grad is an error. The page
    about installation lists errors of torch's inductor with caches that share a buffer.

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
        >>> key = torch.arange(1, 4).view(3, 1, 1).expand(3, 2, 128).bfloat16()
        >>> slots = torch.tensor([17, -1, 18])
        >>> ascend_attn_ops.scatter_pa_kv_cache_(key, key_cache, slots)
        >>> key_cache[1, :4, 0, 0].tolist()
        [0.0, 1.0, 3.0, 0.0]

    Source: docs/operators/scatter_pa_kv_cache.md; CANN's document of aclnnScatterPaKvCache.
    """
    if isinstance(slot_mapping, Tensor) and slot_mapping.is_floating_point():
        expected = "whole numbers behind key and key_cache (torch_npu has another order)"
        raise wrong(
            TypeError, "ascend::scatter_pa_kv_cache_", "slot_mapping", expected, shown(slot_mapping)
        )
    return _OPERATOR.call(
        key, key_cache, slot_mapping, value, value_cache, compress_lens, compress_seq_offset,
        seq_lens, cache_mode, scatter_mode, strides, offsets,
    )  # fmt: skip
