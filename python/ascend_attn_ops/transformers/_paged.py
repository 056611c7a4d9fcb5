"""transformers' continuous batching: fused_infer_attention_score over its paged cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import modeling_flash_attention_utils
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import CacheAllocator

from ascend_attn_ops import ops
from ascend_attn_ops._core.arguments import wrong
from ascend_attn_ops._core.packing import lengths_between
from ascend_attn_ops._core.patches import Patch

# The operator takes pages of a multiple of so many rows.
_PAGE_ROWS = 16


def let_models_load(name: str, patch: Patch) -> None:
    """Let models have an attention whose name contains "flash" without the package flash-attn.

    transformers loads flash-attn's functions for such a model, and off the NPU cannot without the
    package. The attention does not call them.
    """

    found: Callable[..., tuple[Any, ...]] = modeling_flash_attention_utils._lazy_imports

    @wraps(found)
    def lazy_imports(implementation: str | None, *rest: Any, **options: Any) -> tuple[Any, ...]:
        if implementation != name:
            return found(implementation, *rest, **options)
        return None, None, None, None, None

    patch.set_attribute(modeling_flash_attention_utils, "_lazy_imports", lazy_imports)


def let_attention_update(name: str, check: Callable[[Any], None], patch: Patch) -> None:
    """Let the attention of this name write to a paged cache and read its pages where they are.

    The models of transformers 5.24 update the cache before it, which copies all keys; those of 5.23
    pass it on.
    """
    update = PagedAttentionCache.update

    @wraps(update)
    def leave_to_attention(
        cache: PagedAttentionCache,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        if cache.config._attn_implementation != name:
            return update(cache, key_states, value_states, layer_idx, kwargs)
        check(cache.config.__class__)
        _caches[kwargs["cu_seq_lens_q"]] = cache
        _new[key_states] = _new[value_states] = True
        return key_states, value_states

    patch.set_attribute(PagedAttentionCache, "update", leave_to_attention)


class _Step(NamedTuple):
    """The lengths of a step of the server, and the pages of its keys if they are read in place."""

    query_ends: list[int]
    key_ends: list[int]
    block_table: Tensor | None


# All layers of a kind get the same tensors in a step, whose lengths are read on the host once.
_steps: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# Layers that share the keys of another do not update the cache of the step.
_caches: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# Keys and values of the step that attention is to write. A model that changes what the cache
# returns would change these alone, and not those that are cached.
_new: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _allocator_of(module: nn.Module, kwargs: dict[str, Any]) -> CacheAllocator:
    cache = kwargs["cache"] if "cache" in kwargs else _caches[kwargs["cu_seq_lens_q"]]
    return cache.layer_to_allocator[module.layer_idx]


def window_of(module: nn.Module, kwargs: dict[str, Any]) -> int | None:
    """How many keys the cache keeps, of which not every model tells its attention; None for all."""
    return getattr(_allocator_of(module, kwargs), "sliding_window", None)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
    kwargs: dict[str, Any],
) -> Tensor:
    """Writes new keys and values to the cache and attends to all keys of each request.

    Args:
        query, key, value: (1, heads, tokens, size), the new tokens of all requests.
        options: arguments of the operator: heads, scale, mode and sinks.
        kwargs: what transformers prepared for the step.

    Returns:
        (1, tokens, heads, size).
    """
    if kwargs.get("block_table") is not None:
        expected = "None, as this attention reads the pages of every step"
        got = "a tensor; set max_blocks_per_request=0 in ContinuousBatchingConfig"
        raise wrong(NotImplementedError, "generate_batch", "block_table", expected, got)
    if "cache" not in kwargs and not (key in _new and value in _new):
        expected = "what the model caches"
        got = f"what {type(module).__name__} makes of it; use another implementation"
        raise wrong(NotImplementedError, "generate_batch", "value", expected, got)
    layer: int = module.layer_idx  # type: ignore[assignment]
    ends, allocator = kwargs["cu_seq_lens_q"], _allocator_of(module, kwargs)
    if ends not in _steps:
        _steps[ends] = {}
    steps = _steps[ends]
    if allocator.index not in steps:
        steps[allocator.index] = _step_of(allocator, kwargs)
    step: _Step = steps[allocator.index]

    written = kwargs["write_index"][allocator.index]
    key, value = (x[0].transpose(0, 1) for x in (key, value))
    if step.block_table is None:
        read = kwargs["read_index"][allocator.index]
        key, value = allocator.update(key, value, layer, read, written)
        lengths = step.key_ends
    else:
        key_pages, value_pages = allocator.get_cache_for_block_table(layer)
        slots = written.int()
        # Two calls, as pages of keys and of values alternate in one tensor.
        ops.scatter_pa_kv_cache_(key, key_pages, slots)
        ops.scatter_pa_kv_cache_(value, value_pages, slots)
        key, value = key_pages.flatten(2), value_pages.flatten(2)
        lengths = lengths_between(step.key_ends)
    out, _ = ops.fused_infer_attention_score(
        query[0].transpose(0, 1), key, value, **options, layout="TND",
        actual_seq_lengths_query=step.query_ends, actual_seq_lengths_key=lengths,
        block_table=step.block_table,
    )  # fmt: skip
    return out.unsqueeze(0)


def _step_of(allocator: CacheAllocator, kwargs: dict[str, Any]) -> _Step:
    query_ends = kwargs["cu_seq_lens_q"][1:].tolist()
    begins = kwargs["cu_seq_lens_k"][allocator.layer_type]
    key_ends = begins[1:].tolist()
    # The row of every key among the pages of a layer; empty if all keys are new.
    rows, size = kwargs["read_index"][allocator.index], allocator.tokens_per_page
    # The keys of a window are in a ring, which pages do not describe.
    if not rows.numel() or not allocator.supports_block_table or size % _PAGE_ROWS:
        return _Step(query_ends, key_ends, None)
    most = max(lengths_between(key_ends))
    first = begins[:-1, None] + torch.arange(0, most, size, device=rows.device)
    # Entries behind the last page of a request name others, which the operator does not read.
    table = rows[first.clamp(max=rows.numel() - 1)] // size
    return _Step(query_ends, key_ends, table.int())
