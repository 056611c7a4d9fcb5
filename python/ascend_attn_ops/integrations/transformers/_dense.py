"""attn_implementation="ascend": flash_attention_score in the dense models of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, PreTrainedModel, masking_utils
from transformers.generation.continuous_batching import PagedAttentionCache

import ascend_attn_ops as ops
from ascend_attn_ops._npu_graphs import captures
from ascend_attn_ops._packing import Lengths, begins_of_runs, without_empty
from ascend_attn_ops.integrations.transformers import _paged
from ascend_attn_ops.integrations.transformers._sequences import ends_of, packed

NAME = "ascend"
# transformers' continuous batching accepts this name, as it contains "flash".
PAGED_NAME = "ascend_flash"

# Arguments of models that flash_attention_score does not have, and what they are.
_REFUSED = {
    "softcap": "a soft cap of the scores",
    "sinks": "attention sinks that differ between tokens",
    "position_bias": "a position bias",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "output_attentions": "the attention weights as an output",
}

# Layers with an indexer, and those that append keys of their own.
_FOR_ENABLE_DSA = frozenset(
    {"indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention"}
)


def register() -> None:
    """Make ``attn_implementation="ascend"`` known to transformers, for its dense models.

    Attention then is :func:`ascend_attn_ops.flash_attention_score`, forward and backward, with
    grouped heads, sliding windows, dropout and attention sinks. Causal masks, windows, padding and
    packed sequences (position_ids that start over) reach it as modes and lengths, and no mask of
    all pairs is built. That happens for other patterns only (images that attend both ways, padding
    of encoders), and under torch.compile where there may be padding. A collator may say the lengths
    of packed sequences (cu_seq_lens_q and cu_seq_lens_k, tensors). Static and dynamic caches work.
    The output of a padding token differs from that in transformers: generate() needs left padding.

    transformers' eager attention of gpt_oss attends across packed sequences, this one within them,
    under torch.compile with the collator's lengths alone.

    ``attn_implementation="ascend_flash"`` is the same attention under a name that
    ``model.generate_batch`` accepts: transformers' continuous batching refuses names without
    "flash". Each of its steps then is one call of
    :func:`ascend_attn_ops.fused_infer_attention_score` per layer, in layout TND. Layers with full
    attention read the pages of the cache where they are, if ``page_size`` is a multiple of 16.
    transformers copies the keys of a sliding window. The steps run in a thread of their own, where
    :func:`ascend_attn_ops.set_limits` applies and blocks of :func:`ascend_attn_ops.limits` do not.

    Features that the operator lacks raise NotImplementedError in the forward: soft caps, sinks that
    differ between tokens, position biases, output_attentions, models that compute their attention
    themselves, and models with compressed keys (DeepSeek-V4) or an indexer, which are for
    :func:`enable_dsa`.

    Calling it again has no effect; :func:`unregister` undoes it.

    Example:
        >>> import torch, transformers
        >>> from ascend_attn_ops.integrations.transformers import register
        >>> register()
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        ...     num_attention_heads=4, num_key_value_heads=2, attn_implementation="ascend")
        >>> model = transformers.LlamaForCausalLM(config)
        >>> tokens = torch.randint(64, (1, 16))
        >>> model(tokens, labels=tokens).loss.backward()
    """
    for name in (NAME, PAGED_NAME):
        AttentionInterface.register(name, attention)
        masking_utils.AttentionMaskInterface.register(name, mask)
    _paged.let_models_load(PAGED_NAME)
    _let_traces_recognise()


def unregister() -> None:
    """Undo :func:`register`. Models that use its names raise an error in their next forward."""
    for interface in (AttentionInterface, masking_utils.AttentionMaskInterface):
        for name in (NAME, PAGED_NAME):
            interface._global_mapping.pop(name, None)
    _paged.undo()


class _Window:
    """A causal mask within a window, as transformers' sliding_window_causal_mask_function."""

    def __init__(self, window: int) -> None:
        self.window = window

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key > query - self.window) & (key <= query)


class _InPacks:
    """A mask within packed sequences, as transformers' packed_sequence_compatibility_function."""

    def __init__(
        self, mask_function: Callable[..., Any], position_ids: Tensor, sequences: Tensor
    ) -> None:
        self.mask_function = mask_function
        self.position_ids = position_ids
        self.sequences = sequences

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = self.sequences[batch, query] == self.sequences[batch, key]
        positions = self.position_ids[batch, query], self.position_ids[batch, key]
        return same & self.mask_function(batch, head, *positions)


@cache
def _let_traces_recognise() -> None:
    """Makes objects of the closures that transformers makes under torch.compile, for any attention:
    a trace cannot look into a closure."""

    @torch.compiler.substitute_in_graph(masking_utils.sliding_window_causal_mask_function)
    def _(sliding_window: int) -> Callable[..., Tensor]:
        return _Window(sliding_window)

    @torch.compiler.substitute_in_graph(masking_utils.packed_sequence_compatibility_function)
    def _(
        mask_function: Callable[..., Any], position_ids: Tensor, packed_sequence_mask: Tensor
    ) -> Callable[..., Tensor]:
        return _InPacks(mask_function, position_ids, packed_sequence_mask)


class _Pattern(NamedTuple):
    """A causal mask: within a window, and within the sequences that equal numbers (B, S) mark."""

    window: int | None
    sequences: Tensor | None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **options: Any,
) -> Tensor | None:
    """The attention_mask that `attention` gets.

    - None means what it means to transformers' own scaled_dot_product_attention: causal from the
      first key on, or without a mask in a layer that is not causal, or for a single query;
    - bool, (B, 1, queries, keys), True keeps a key;
    - int32, (B or 1, 1, 2, keys), a causal mask in brief: equal numbers mark the keys of a
      sequence, and beside them stands the window, or 0. The queries are the last keys; further keys
      are not read. transformers passes on a mask of four axes as it is;
    - int32, (1, 1, 1, tokens), on the host: the ends of packed sequences, in which the mask is
      causal, under torch.compile.
    """
    if not is_compiling():
        _positions.clear()
    layer_types = getattr(config, "layer_types", None) or ()
    if not _FOR_ENABLE_DSA.isdisjoint(layer_types):
        raise NotImplementedError(
            f'attn_implementation="{NAME}": {type(config).__name__} has an indexer or compressed '
            "keys; load the model with another implementation and call enable_dsa(model)"
        )
    config_class: Any = type(config)
    if config is not None and not _lets_attention_be_chosen(config_class):
        raise NotImplementedError(
            f'attn_implementation="{NAME}": the models of {config_class.__name__} compute their '
            'attention themselves; use another implementation, such as "eager"'
        )

    def of_all_pairs() -> Tensor | None:
        return masking_utils.sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
            kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
            use_vmap=use_vmap, device=device, **options,
        )  # fmt: skip

    # For a single query a mask is small, and that of a compiled decoding step must stay a tensor.
    if is_compiling() or use_vmap or q_length == 1:
        causal = isinstance(mask_function, _InPacks) and (
            mask_function.mask_function is masking_utils.causal_mask_function
            or isinstance(mask_function.mask_function, _Window)
        )
        return ends_of(mask_function.sequences) if causal else of_all_pairs()  # type: ignore[attr-defined]
    pattern = _recognise(mask_function)
    if pattern is None:
        return of_all_pairs()

    offset = int(q_offset)
    keys = offset + q_length - kv_offset
    if attention_mask is not None and attention_mask.shape[-1] < offset + q_length:
        raise ValueError(
            f"attention_mask: expected at least {offset + q_length} columns, the tokens and what "
            f"is cached, got {attention_mask.shape[-1]}"
        )
    window = pattern.window if pattern.window is not None and pattern.window < keys else None
    sequences = pattern.sequences
    if attention_mask is not None:
        valid = attention_mask[:, kv_offset : kv_offset + keys].bool()
        changes = valid.diff(dim=-1) != 0
        if bool((valid.int().diff(dim=-1) > 0).sum(-1).add(valid[:, 0]).max() > 1):
            # A key may be seen from the other side of a gap.
            return of_all_pairs()
        if bool(changes.any()) or not bool(valid.all()):
            sequences = nn.functional.pad(changes.int().cumsum(-1), (1, 0))
    if sequences is None:
        if window is None and offset == kv_offset == 0:
            return None
        sequences = torch.zeros(1, keys, device=device)
    brief = torch.stack([sequences, torch.full_like(sequences, window or 0)], 1)
    return brief.to(device, torch.int32).unsqueeze(1)


@cache
def _lets_attention_be_chosen(config_class: Any) -> bool:
    """Whether masks as scaled_dot_product_attention takes them mean to its models what they say.

    transformers hands masks of an unknown implementation to models that never ask for it too.
    """

    def kinds_of(kind: type[PreTrainedModel]) -> Iterator[type[PreTrainedModel]]:
        for special in kind.__subclasses__():
            yield special
            yield from kinds_of(special)

    models = (model for model in kinds_of(PreTrainedModel) if model.config_class is config_class)
    return all(model._supports_sdpa or model._supports_attention_backend for model in models)


def _recognise(function: Callable[..., Any]) -> _Pattern | None:
    """The pattern of a mask function of transformers, which is a closure over what it depends on.

    None for all that is not known to be causal: a mask of all pairs is then right, if large.
    """
    causal, window, sequences = False, None, None
    pending = [function]
    while pending:
        function = pending.pop()
        kind = getattr(function, "__qualname__", "").partition(".<locals>")[0]
        made_of = inspect.getclosurevars(function).nonlocals
        if function is masking_utils.causal_mask_function:
            causal = True
        elif kind == "and_masks":
            pending += made_of["mask_functions"]
        elif kind == "sliding_window_overlay":
            window = made_of["sliding_window"]
        elif kind == "packed_sequence_mask_function":
            sequences = made_of["packed_sequence_mask"]
        elif kind == "remap_positions_for_packed_sequence":
            # Inside a sequence, positions differ by as much as indices.
            pending.append(made_of["mask_function"])
        else:
            return None
    return _Pattern(window, sequences) if causal else None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of tensors (B, heads, tokens, size); returns (B, tokens, heads, size).

    s_aux is transformers' name of the attention sinks, (heads,).

    Raises:
        NotImplementedError: the model's attention has something that the operator has not.
        TypeError, ValueError: the mask is none of `mask`.
    """
    for name, what in _REFUSED.items():
        given = kwargs.get(name)
        if given is not None and given is not False:
            raise NotImplementedError(
                f'attn_implementation="{NAME}": {name}: flash_attention_score does not compute '
                f"{what}, which {type(module).__name__} asks for; use another implementation, "
                'such as "eager"'
            )
    options: dict[str, Any] = {"num_heads": query.shape[1], "scale_value": scaling, "sink": s_aux}
    cache = kwargs.get("cache")
    if isinstance(cache, PagedAttentionCache):
        options = {**options, **_causal(sliding_window), "num_key_value_heads": key.shape[1]}
        return _paged.attention(module, query, key, value, cache, options, kwargs), None
    options["dropout_p"] = dropout
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # transformers tells the masks of models where packed sequences begin, but not those of gpt_oss.
    positions = None if s_aux is None else kwargs.get("position_ids")
    ends = _ends_of_collator(query, key, kwargs) if causal else None
    if ends is None and causal:
        if attention_mask is None:
            ends = _ends_of_positions(positions, query, key)
        elif attention_mask.dtype == torch.int32 and attention_mask.shape[1:3] == (1, 1):
            ends = attention_mask.flatten(), attention_mask.flatten()
    if ends is not None:
        window = sliding_window if key.shape[2] > (sliding_window or 0) else None
        return _in_pack(query, key, value, ends, {**options, **_causal(window)}), None
    if attention_mask is None:
        return _without_mask(query, key, value, bool(causal), sliding_window, options), None
    if attention_mask.dtype == torch.bool:
        options["attn_mask"] = attention_mask.expand(-1, -1, query.shape[2], -1)
        return _in_batches(query, key, value, {**options, "sparse_mode": 1}), None
    if attention_mask.dtype == torch.int32 and attention_mask.shape[1:3] == (1, 2):
        return _in_sequences(query, key, value, attention_mask, positions, options), None
    raise TypeError(
        f'attn_implementation="{NAME}": attention_mask: expected (B, keys), or bool of shape '
        f"(B, 1, queries, keys) where True keeps a key, got {attention_mask.dtype} of shape "
        f"{tuple(attention_mask.shape)}"
    )


def _ends_of_collator(
    query: Tensor, key: Tensor, kwargs: dict[str, Any]
) -> tuple[Lengths, Lengths] | None:
    """The ends of the sequences that a collator has packed into one row of tokens, if it says them.

    They are tensors, so that compiled models read them as well.
    """
    query_ends = kwargs.get("cu_seq_lens_q")
    key_ends = kwargs.get("cu_seq_lens_k", query_ends)
    if not isinstance(query_ends, Tensor) or not isinstance(key_ends, Tensor):
        return None
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        return None  # a step of generation, whose keys are in a cache
    return query_ends.flatten()[1:], key_ends.flatten()[1:]


def _causal(window: int | None) -> dict[str, Any]:
    if not window:
        return {"sparse_mode": 3}
    return {"sparse_mode": 4, "pre_tokens": window - 1, "next_tokens": 0}


def _without_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    window: int | None,
    options: dict[str, Any],
) -> Tensor:
    queries, keys = query.shape[2], key.shape[2]
    moot = window is None or keys <= window
    if not causal and not moot:
        raise ValueError(
            f'attn_implementation="{NAME}": sliding_window: expected a mask beside a window of '
            "attention that is not causal"
        )
    if causal and queries > 1:
        # A static cache has room behind the tokens.
        key, value = key[:, :, :queries], value[:, :, :queries]
    options = {**options, **(_causal(None if moot else window) if causal else {})}
    return _in_batches(query, key, value, options)


def _in_batches(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    out, *_ = ops.flash_attention_score(query, key, value, **options, layout="BNSD")
    return out.transpose(1, 2).contiguous()


def _in_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    brief: Tensor,
    position_ids: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    keys = brief.shape[-1]
    key, value = key[:, :, :keys], value[:, :, :keys]
    window, ends = _lengths(brief, query.shape[0], query.shape[2])
    options = {**options, **_causal(window)}
    if ends is None:
        ends = _ends_of_positions(position_ids, query, key)
    if ends is None:
        return _in_batches(query, key, value, options)
    return _in_pack(query, key, value, ends, options)


def _in_pack(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Lengths, Lengths],
    options: dict[str, Any],
) -> Tensor:
    batch, heads, queries, _ = query.shape
    tensors = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    query_ends, key_ends = ends
    out, *_ = ops.flash_attention_score(
        *tensors, **options, layout="TND",
        actual_seq_lengths_query=query_ends, actual_seq_lengths_key=key_ends,
    )  # fmt: skip
    return out.view(batch, queries, heads, -1)


# All layers get the same mask and positions, whose lengths are read on the host once. A forward
# makes its masks anew, and may change its positions in place: `mask` forgets them.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_positions: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _ends_of_positions(
    position_ids: Tensor | None, query: Tensor, key: Tensor
) -> tuple[Lengths, Lengths] | None:
    """The ends of the queries and keys of sequences whose positions start over, if any do."""
    batch, _, queries, _ = query.shape
    # Keys of a cache have no positions here.
    if position_ids is None or key.shape[2] != queries or queries == 1:
        return None
    if position_ids.shape not in ((batch, queries), (1, queries)):
        return None
    if is_compiling() or captures(query.device):
        return None
    if position_ids not in _positions:
        found = packed(position_ids.expand(batch, -1))
        ends = None if found is None else (found.query_ends, found.query_ends)
        _positions[position_ids] = ends
    known: tuple[Lengths, Lengths] | None = _positions[position_ids]
    return known


def _lengths(
    brief: Tensor, batch: int, queries: int
) -> tuple[int | None, tuple[Lengths, Lengths] | None]:
    """The window, and the ends of the queries and keys of all sequences, if not one per batch."""
    if brief not in _known:
        numbers, windows = brief[:, 0].unbind(1)
        keys = brief.shape[-1]
        begins = begins_of_runs(numbers.expand(batch, -1), 0)
        ends = None
        if len(begins) > batch:
            found = [(_queries_before(end, queries, keys), end) for end in begins[1:]]
            kept = without_empty([*found, (batch * queries, batch * keys)])
            ends = ([q for q, _ in kept], [k for _, k in kept])
        _known[brief] = (int(windows[0, 0]) or None, ends)
    return _known[brief]


def _queries_before(end: int, queries: int, keys: int) -> int:
    """How many queries come before a key, where each batch's queries are its last keys."""
    row, key = divmod(end, keys)
    return row * queries + max(0, key - (keys - queries))
