"""The caches of flash_attn_with_kvcache: where their rows are, what is written, what is read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import check_flag, readable, shown, wrong
from ascend_attn_ops._core.npu_graphs import captures
from ascend_attn_ops._core.packing import bounds_on_host, ends_of, lengths_on
from ascend_attn_ops._core.pages import (
    check_blocks,
    check_indices,
    gather_keys_and_values,
    slot_mapping,
)
from ascend_attn_ops.flash_attn import _calls as calls
from ascend_attn_ops.flash_attn import _conventions as conventions
from ascend_attn_ops.ops.scatter_pa_kv_cache import scatter_pa_kv_cache_


def append(
    k_cache: Tensor, v_cache: Tensor, table: Tensor | None, k: Tensor, v: Tensor, begin: Tensor,
) -> None:  # fmt: skip
    """Write k and v in place, from position `begin` of each sequence on.

    Args:
        table: (batch_size, blocks of a sequence); None where block b is all of sequence b.
    """
    batch, new = k.shape[:2]
    device = k.device
    positions = torch.arange(new, dtype=torch.int32, device=device).expand(batch, new)
    # A plain copy of a tensor on the CPU would wait for the device.
    on_device = lengths_on(begin, k)
    assert on_device is not None
    positions = positions + on_device[:, None]
    size = k_cache.shape[1]
    if table is None:
        slots = positions + torch.arange(0, batch * size, size, device=device)[:, None]
    else:
        slots = slot_mapping(table, positions, size)
    scatter_pa_kv_cache_(k.flatten(0, 1), k_cache, slots.flatten(), v.flatten(0, 1), v_cache)


def attend_with_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None,
    rotary_cos: Tensor | None, rotary_sin: Tensor | None, cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None, cache_leftpad: Tensor | None, block_table: Tensor | None,
    softmax_scale: float | None, causal: bool, window_size: tuple[int, int], softcap: float,
    alibi_slopes: Tensor | None, return_softmax_lse: bool, sinks: conventions.Sinks,
    cu_seqlens_q: object = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """flash_attn_with_kvcache of both versions: out, and lse where it is asked for."""
    name = "flash_attn_with_kvcache"
    conventions.check_tensors(name, 4 if cu_seqlens_q is None else 3, "q", q)
    conventions.check_tensors(name, 4, "k_cache v_cache", k_cache, v_cache)
    check_flag(name, "return_softmax_lse", return_softmax_lse)
    options = conventions.options_of(
        name, causal, window_size, softmax_scale, softcap, alibi_slopes, 0.0, return_softmax_lse,
        sinks, ("cu_seqlens_q", "cache_seqlens"),
    )  # fmt: skip
    for argument, given in (
        ("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin), ("cache_leftpad", cache_leftpad),
    ):  # fmt: skip
        if given is not None:
            conventions.refuse(name, argument, "None", type(given).__name__)
    q, k, v = conventions.under_autocast(q, k, v)
    q_ends = None if cu_seqlens_q is None else ends_of(name, "cu_seqlens_q", cu_seqlens_q)
    batch = q.shape[0] if q_ends is None else len(q_ends)
    new, table = 0, None
    if k is not None or v is not None:
        conventions.check_tensors(name, 4, "k v", k, v)
    if k is not None and v is not None:
        check_new(name, batch, k, v)
        new = k.shape[1]
    tensors = (q, k_cache, v_cache, k, v, options.sink)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        conventions.refuse(
            name, "q, k_cache, v_cache, k, v, s_aux", "no gradient to be wanted",
            "a tensor that requires grad; call the function under torch.no_grad(), or detach the "
            "tensor",
        )  # fmt: skip
    blocks, slots = k_cache.size(0), k_cache.size(1)
    room = slots
    if block_table is not None or cache_batch_idx is not None:
        table = table_of(name, batch, blocks, cache_batch_idx, block_table)
        room *= table.shape[-1]
    elif blocks < batch:
        expected = f"a row for each of {batch} sequences"
        raise wrong(ValueError, name, "k_cache", expected, str(list(k_cache.shape)))
    before, lengths = lengths_with_new(name, q, batch, room, new, cache_seqlens)
    conventions.check_values_of_slopes(name, alibi_slopes)
    if k is not None and v is not None and new:
        if not torch.compiler.is_compiling():
            # Errors of the attention come before the caches are written. One copy of the lengths
            # to the host serves the check and the call.
            if not (lengths.is_meta or captures(lengths.device)):
                lengths = lengths.cpu()
            if table is not None:
                check_blocks(name, table, lengths, slots, blocks)
            _check(options, q, k_cache, v_cache, table, lengths, q_ends)
        append(k_cache, v_cache, table, k, v, before)
    return attend(options, q, k_cache, v_cache, table, lengths, q_ends)


def _check(
    options: conventions.Options, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None,
    lengths: Tensor, q_ends: Tensor | Sequence[int] | None,
) -> None:  # fmt: skip
    slopes, name = options.slopes, options.function
    without_values = options._replace(
        slopes=None if slopes is None else slopes.to("meta"),
        sink=conventions.on_meta(name, "s_aux", options.sink, q),
        return_lse=False,
    )
    table = conventions.on_meta(name, "block_table", table, q)
    q, k, v = (x.to("meta") for x in (q, k, v))
    attend(without_values, q, k, v, table, lengths, q_ends)


def attend(
    options: conventions.Options, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None,
    lengths: Tensor, q_ends: Tensor | Sequence[int] | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """out as q, and lse with the heads before the queries.

    Args:
        k, v: the caches, (blocks, slots of a block, nheads_k, headdim).
        table: as of `append`; without it the caches are read where they lie.
        lengths: what is valid of each sequence, the new keys included.
        q_ends: of packed queries.
    """
    if q_ends is not None and table is not None:
        return calls.attend_paged(options, q, k, v, q_ends, table, lengths)
    if table is None and k.shape[0] != lengths.shape[0]:
        k, v = k[: lengths.shape[0]], v[: lengths.shape[0]]
    if q_ends is not None:
        return calls.attend_batches_packed(options, q, k, v, q_ends, lengths)
    if calls.is_for_inference(options, q, k, v, table):
        return calls.infer(options, "BSND", q, k, v, table, lengths)
    if table is not None:
        k, v = gather_keys_and_values(options.function, k, v, table, lengths)
    return calls.attend(options, q, k, v, lengths)


def table_of(
    function: str, batch: int, rows: int, cache_batch_idx: Tensor | None,
    block_table: Tensor | None,
) -> Tensor:  # fmt: skip
    """The blocks of each sequence: without block_table, one row of the cache."""
    if cache_batch_idx is None:
        assert block_table is not None
        check_indices(function, "block_table", block_table, 2)
        return block_table
    if block_table is not None:
        expected = "None beside block_table"
        raise wrong(ValueError, function, "cache_batch_idx", expected, "a tensor")
    check_indices(function, "cache_batch_idx", cache_batch_idx, 1)
    if list(cache_batch_idx.shape) != [batch]:
        expected = f"shape ({batch},), one row of the cache for each sequence"
        got = str(list(cache_batch_idx.shape))
        raise wrong(ValueError, function, "cache_batch_idx", expected, got)
    beyond = (cache_batch_idx < 0) | (cache_batch_idx >= rows)
    if readable(beyond) and bool(beyond.any()):
        got = shown(cache_batch_idx.tolist())
        raise wrong(ValueError, function, "cache_batch_idx", f"0..{rows - 1}", got)
    return cache_batch_idx[:, None]


def check_new(function: str, batch: int, k: Tensor, v: Tensor) -> None:
    """Checks what the flat rows of an append no longer show."""
    for name, x in (("k", k), ("v", v)):
        if x.shape[:2] != (batch, k.shape[1]):
            expected = f"shape ({batch}, {k.shape[1]}, nheads_k, headdim), as q and k have it"
            raise wrong(ValueError, function, name, expected, str(list(x.shape)))


def lengths_with_new(
    function: str, q: Tensor, batch: int, slots: int, new: int, cache_seqlens: int | Tensor | None
) -> tuple[Tensor, Tensor]:
    """How many keys each sequence holds before its new ones, and with them."""
    if cache_seqlens is None:
        if new:
            raise wrong(ValueError, function, "cache_seqlens", "where k and v are written", "None")
        cache_seqlens = slots
    if isinstance(cache_seqlens, Tensor):
        bounds = bounds_on_host(cache_seqlens)
        if bounds is None:
            check_indices(function, "cache_seqlens", cache_seqlens, 1)
        before = cache_seqlens
        if before.shape[0] != batch:
            got = str(list(before.shape))
            raise wrong(ValueError, function, "cache_seqlens", f"shape ({batch},)", got)
        if not before.is_cpu and before.device != q.device:
            expected = f"a tensor on the host or on {q.device} (q's)"
            raise wrong(ValueError, function, "cache_seqlens", expected, str(before.device))
        first = []
        if bounds is None or bounds[1] < 0 or bounds[2] > slots - new:
            outside = (before < 0) | (before > slots - new)
            if readable(outside) and bool(outside.any()):
                first = before[outside][:1].tolist()
    elif isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
        before = torch.full((batch,), cache_seqlens, device="cpu")
        fits = torch.compiler.is_compiling() or 0 <= cache_seqlens <= slots - new
        first = [] if fits else [cache_seqlens]
    else:
        got = type(cache_seqlens).__name__
        raise wrong(TypeError, function, "cache_seqlens", "an int or a tensor", got)
    if first:
        allowed = f"0..{slots - new}, as a sequence has {slots} slots, {new} of them for k"
        raise wrong(ValueError, function, "cache_seqlens", allowed, str(first[0]))
    return before, before + new if new else before
