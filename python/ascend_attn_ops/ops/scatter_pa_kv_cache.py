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

    Slot s is position s % block_size of block s // block_size. With the defaults::

        key_cache.flatten(0, 1)[slot_mapping] = key
        value_cache.flatten(0, 1)[slot_mapping] = value

    except that rows with a negative slot are skipped. Copies are bit-exact, and positions that no
    row is written to keep their bytes. On the CPU, an error leaves the caches unchanged. While grad
    mode is on, an argument that requires grad is an error.

    Args:
        key: (T, N, Dk), sequences packed, or on Ascend 950 (B, S, N, Dk); any strides. float16,
            bfloat16 or int8; on Ascend 950 also float32, uint8, int16, uint16, int32, uint32,
            float8_e5m2 and float8_e4m3fn.
        key_cache: (num_blocks, block_size, N, Dk); "PA_NZ": (num_blocks, N * Dk / L, block_size, L)
            or (num_blocks, N, Dk / L, block_size, L) with L = 32 bytes, see :func:`nz_cache_shape`;
            Alibi, Rope and Omni: (num_blocks, block_size, 1, Dk). key's dtype. Contiguous, or from
            CANN 9.1 on with gaps between its blocks.
        slot_mapping: (T,); for Alibi, Rope and Omni (B * N,), for rank 4 (B, N). int32 or int64
            (these modes on A2 and A3: int32). Below num_blocks * block_size, no slot twice.
        value: (T, N, Dv) or (B, S, N, Dv); key's dtype, in "PA_NZ" also a half type.
        value_cache: as key_cache, with Dv.
        compress_lens: (B * N,), for rank 4 (B, N); how many rows to keep ("Alibi"), or the length
            of the window.
        compress_seq_offset: (B * N,); first row of the window, -1 for none.
        seq_lens: (B,); rows of each sequence. The sum is T for packed sequences.
        cache_mode: "Norm" or "PA_NZ".
        scatter_mode: "None"; "Nct": key and value are parts of a wider buffer; "Alibi", "Rope" or
            "Omni": each head of a sequence is written to consecutive slots from its slot on, as its
            last rows, with a window replaced by its mean, or without the window.
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
