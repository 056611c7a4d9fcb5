"""attn_implementation="ascend": flash_attention_score in the dense models of transformers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, PreTrainedModel, masking_utils

from ascend_attn_ops import ops
from ascend_attn_ops._core.arguments import shown, wrong
from ascend_attn_ops._core.npu_graphs import captures
from ascend_attn_ops._core.packing import begins_of_runs, without_empty
from ascend_attn_ops._core.patches import Patch
from ascend_attn_ops.transformers import _paged
from ascend_attn_ops.transformers._layers import ANOTHER_INDEXER, SERVED
from ascend_attn_ops.transformers._sequences import (
    Sequences,
    ends_of,
    from_begins,
    of_collator,
)

NAME = "ascend"
# transformers' continuous batching accepts this name, as it contains "flash".
PAGED_NAME = "ascend_flash"

_WHERE = f'attn_implementation="{NAME}"'
_ANOTHER = 'use another implementation, such as "eager"'

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
_FOR_ENABLE_DSA = (
    "indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention",
)  # fmt: skip

_registered: Patch | None = None


def register() -> None:
    """Make ``attn_implementation="ascend"`` known to transformers, for its dense models.

    Attention then is :func:`ascend_attn_ops.flash_attention_score`, forward and backward, with
    grouped heads, sliding windows, dropout and attention sinks. Causal masks, windows, padding and
    packed sequences (position_ids that start over) reach it as modes and lengths. A mask of all
    pairs is built for other patterns only, and under torch.compile where there may be padding. The
    output of a padding token differs from that in transformers: generate() needs left padding.

    Compiled models with a cache, and those of gpt_oss always, need a collator that says the lengths
    of packed sequences (cu_seq_lens_q).

    ``attn_implementation="ascend_flash"`` is the same attention by a name that
    ``model.generate_batch`` accepts: each step is one call of
    :func:`ascend_attn_ops.fused_infer_attention_score` per layer.

    Features that the operator lacks raise NotImplementedError in the forward: soft caps, sinks that
    differ between tokens, position biases, output_attentions, models that compute their attention
    themselves, and models that are for :func:`enable_dsa`.

    Calling it again has no effect; :func:`unregister` undoes it.

    Example:
        >>> import torch, transformers
        >>> from ascend_attn_ops.transformers import register
        >>> register()
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        ...     num_attention_heads=4, num_key_value_heads=2, attn_implementation="ascend")
        >>> model = transformers.LlamaForCausalLM(config)
        >>> tokens = torch.randint(64, (1, 16))
        >>> model(tokens, labels=tokens).loss.backward()
    """
    global _registered
    if _registered is not None:
        return
    _let_traces_recognise()
    with Patch() as patch:
        for name in (NAME, PAGED_NAME):
            patch.set_item(AttentionInterface._global_mapping, name, attention)
            patch.set_item(masking_utils.AttentionMaskInterface._global_mapping, name, mask)
        _paged.let_models_load(PAGED_NAME, patch)
        _paged.let_attention_update(PAGED_NAME, _check_that_attention_can_be_chosen, patch)
    _registered = patch


def unregister() -> None:
    """Undo :func:`register`. Models that use its names raise an error in their next forward."""
    global _registered
    if _registered is not None:
        _registered.undo()
        _registered = None


# The functions of transformers that make mask functions, and what `_recognise` reads of those.
_MAKERS = {
    "and_masks": "mask_functions",
    "sliding_window_overlay": "sliding_window",
    "packed_sequence_mask_function": "packed_sequence_mask",
    "remap_positions_for_packed_sequence": "mask_function",
}


class _Mask:
    """A mask function that a trace can look into, unlike a closure."""

    def __init__(self, kind: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.kind = kind
        self.make = make
        self.arguments = arguments

    def __call__(self, *indices: Tensor) -> Tensor:
        result: Tensor = self.make(*self.arguments)(*indices)
        return result


@cache
def _let_traces_recognise() -> None:
    """Makes objects of the closures that transformers makes under torch.compile, for any
    attention."""

    def substitute(kind: str) -> None:
        maker = getattr(masking_utils, kind)
        # A copy is not substituted.
        make = FunctionType(maker.__code__, maker.__globals__, kind)

        @torch.compiler.substitute_in_graph(maker, skip_signature_check=True)
        def _(*arguments: Any) -> Callable[..., Tensor]:
            return _Mask(kind, make, arguments)

    for kind in _MAKERS:
        substitute(kind)


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
    - int32, (1 + window, 1, 1, tokens), on the host: the ends of packed sequences, in which the
      mask is causal, under torch.compile. All rows are one, and without a window there is one.
    """
    if not is_compiling():
        _once.begin()
    layer_types = getattr(config, "layer_types", None) or ()
    if any(kind in _FOR_ENABLE_DSA for kind in layer_types):
        what = "load the model with another implementation and call enable_dsa(model)"
        hint = what if config.model_type in SERVED else ANOTHER_INDEXER
        got = f"{type(config).__name__}; {hint}"
        expected = "a model without an indexer and compressed keys"
        raise wrong(NotImplementedError, _WHERE, "config", expected, got)
    _check_that_attention_can_be_chosen(config.__class__)

    def of_all_pairs() -> Tensor | None:
        return masking_utils.sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
            kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
            use_vmap=use_vmap, device=device, **options,
        )  # fmt: skip

    # For a single query a mask is small, and that of a compiled decoding step must stay a tensor.
    if is_compiling() or use_vmap or q_length == 1:
        found = _recognise(mask_function) if is_compiling() else None
        if found is None or found.sequences is None:
            return of_all_pairs()
        return ends_of(found.sequences).expand((found.window or 0) + 1, -1, -1, -1)
    pattern = _recognise(mask_function)
    # Models whose layers change the mask ask for one of all pairs; transformers itself, for packs.
    asked = not options.get("allow_is_causal_skip", True)
    if pattern is None or (asked and pattern.sequences is None):
        return of_all_pairs()

    offset = int(q_offset)
    keys = offset + q_length - kv_offset
    if attention_mask is not None and attention_mask.shape[-1] < offset + q_length:
        expected = f"at least {offset + q_length} columns, the tokens and what is cached"
        raise wrong(ValueError, _WHERE, "attention_mask", expected, str(attention_mask.shape[-1]))
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
def _check_that_attention_can_be_chosen(config_class: Any) -> None:
    """Raises where masks as scaled_dot_product_attention takes them mean something else to a model.

    transformers hands masks of an unknown implementation to models that never ask for it too.
    """

    def kinds_of(kind: type[PreTrainedModel]) -> Iterator[type[PreTrainedModel]]:
        for special in kind.__subclasses__():
            yield special
            yield from kinds_of(special)

    models = (model for model in kinds_of(PreTrainedModel) if model.config_class is config_class)
    if not all(model._supports_sdpa or model._supports_attention_backend for model in models):
        got = f"{config_class.__name__}, whose models compute it themselves; {_ANOTHER}"
        expected = "models that let their attention be chosen"
        raise wrong(NotImplementedError, _WHERE, "config", expected, got)


def _recognise(function: Callable[..., Any]) -> _Pattern | None:
    """The pattern of a mask function of transformers, which is a closure over what it depends on.

    None for all that is not known to be causal: a mask of all pairs is then right, if large.
    """
    causal, window, sequences = False, None, None
    pending = [function]
    while pending:
        function = pending.pop()
        if function is masking_utils.causal_mask_function:
            causal = True
            continue
        kind, made_of = _made_of(function)
        if kind == "and_masks":
            pending += made_of
        elif kind == "sliding_window_overlay":
            window = made_of
        elif kind == "packed_sequence_mask_function":
            sequences = made_of
        elif kind == "remap_positions_for_packed_sequence":
            # Inside a sequence, positions differ by as much as indices.
            pending.append(made_of)
        else:
            return None
    return _Pattern(window, sequences) if causal else None


def _made_of(function: Callable[..., Any]) -> tuple[str, Any]:
    """Which function of `_MAKERS` has made it, and of what."""
    if isinstance(function, _Mask):
        every = function.kind == "and_masks"
        return function.kind, function.arguments if every else function.arguments[0]
    if is_compiling():
        return "", None
    kind = getattr(function, "__qualname__", "").partition(".<locals>")[0]
    if kind not in _MAKERS:
        return "", None
    return kind, inspect.getclosurevars(function).nonlocals[_MAKERS[kind]]


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
            expected = f"none, as flash_attention_score does not compute {what}"
            got = f"one from {type(module).__name__}; {_ANOTHER}"
            raise wrong(NotImplementedError, _WHERE, name, expected, got)
    options: dict[str, Any] = {"num_heads": query.shape[1], "scale_value": scaling, "sink": s_aux}
    if "write_index" in kwargs:
        # transformers 5.23 makes one that says what the lengths say, for all heads.
        if attention_mask is not None and ("cache" not in kwargs or attention_mask.shape[1] > 1):
            got = f"one from {type(module).__name__}; {_ANOTHER}"
            raise wrong(NotImplementedError, _WHERE, "attention_mask", "None beside pages", got)
        window = _paged.window_of(module, kwargs) or sliding_window
        options.update(_mode(True, window), num_key_value_heads=key.shape[1])
        return _paged.attention(module, query, key, value, options, kwargs), None
    options["dropout_p"] = dropout
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    queries, keys = query.shape[2], key.shape[2]
    pack = of_collator(_WHERE, kwargs, queries, keys) if causal or keys == queries else None
    form = None if attention_mask is None else (attention_mask.dtype, *attention_mask.shape[1:3])
    if form == (torch.int32, 1, 2):
        causal, brief = True, cast("Tensor", attention_mask)
        key, value = key[:, :, : brief.shape[-1]], value[:, :, : brief.shape[-1]]
        sliding_window, found = _lengths(module, brief, query)
        pack = pack or found
    elif form == (torch.int32, 1, 1):
        causal, copies = True, cast("Tensor", attention_mask)
        sliding_window, ends = copies.shape[0] - 1, copies[0].flatten()
        pack = pack or Sequences(ends, ends, None)
    elif attention_mask is not None:
        options.update(_pairs(module, query, attention_mask, keys))
    elif causal and queries > 1:
        # A static cache has room behind the tokens.
        key, value = key[:, :, :queries], value[:, :, :queries]
    elif not causal and sliding_window is not None and sliding_window < keys and pack is None:
        expected = "None without a mask in attention that is not causal"
        raise wrong(ValueError, _WHERE, "sliding_window", expected, shown(sliding_window))
    if "sparse_mode" not in options:
        if causal and pack is None:
            pack = _of_positions(module, kwargs.get("position_ids"), query, key.shape[2])
        options.update(_mode(causal, sliding_window, key.shape[2]))
    if pack is None:
        out, *_ = ops.flash_attention_score(query, key, value, **options, layout="BNSD")
        return out.transpose(1, 2).contiguous(), None
    return _in_pack(query, key, value, pack, options), None


def _mode(causal: bool, window: int | None, keys: int = sys.maxsize) -> dict[str, Any]:
    if not window or window >= keys:
        return {"sparse_mode": 3} if causal else {}
    return {"sparse_mode": 4, "pre_tokens": window - 1, "next_tokens": 0 if causal else window - 1}


def _pairs(module: nn.Module, query: Tensor, mask: Tensor, keys: int) -> dict[str, Any]:
    """A mask of all pairs, as the operator takes it."""
    if mask.ndim != 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        expected = (
            "(B, keys), or (B, 1, queries, keys), bool where True keeps a key or what is added to "
            "the scores"
        )
        raise wrong(TypeError, _WHERE, "attention_mask", expected, shown(mask))
    options: dict[str, Any] = {"sparse_mode": 1}
    if mask.is_floating_point():
        if is_compiling() or captures(query.device) or mask.requires_grad:
            kept, bias = _kept_and_bias(mask, query.dtype)
        else:
            kept, bias = _once.read(module, mask, lambda x: _kept_and_bias(x, query.dtype, True))
        mask = kept
        if bias is not None:
            options.update(pse_shift=bias[..., :keys], pse_type=0)
    batch = len(query) if mask.shape[1] > 1 else -1
    return {**options, "attn_mask": mask[..., :keys].expand(batch, -1, query.shape[2], -1)}


def _kept_and_bias(
    mask: Tensor, dtype: torch.dtype, read: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Numbers that are added to the scores keep a key, unless they are -inf or the smallest.

    As a bias, -inf makes NaN on a device.
    """
    bias = mask.to(dtype)
    kept = (mask > torch.finfo(mask.dtype).min) & (bias > torch.finfo(dtype).min)
    bias = bias.where(kept, 0)
    return kept, None if read and not bias.any() else bias


def _in_pack(
    query: Tensor, key: Tensor, value: Tensor, pack: Sequences, options: dict[str, Any]
) -> Tensor:
    batch, heads, queries, _ = query.shape
    tensors = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if "attn_mask" in options:
        if "pse_shift" in options or options["attn_mask"].shape[1] > 1:
            expected = "bool, the same for all heads, beside lengths of a pack (cu_seq_lens_q)"
            raise wrong(NotImplementedError, _WHERE, "attention_mask", expected, "another mask")
        options["attn_mask"] = torch.block_diag(*options["attn_mask"][:, 0])
    out, *_ = ops.flash_attention_score(
        *tensors, **options, layout="TND",
        actual_seq_lengths_query=pack.query_ends, actual_seq_lengths_key=pack.key_ends,
    )  # fmt: skip
    return out.view(batch, queries, heads, -1)


class _OncePerForward:
    """Values that the host reads of tensors which all layers of a forward get.

    A forward begins where its masks are made, or where a layer asks again: tensors may have changed
    in place, which nothing else tells.
    """

    def __init__(self) -> None:
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def begin(self) -> None:
        self._known.clear()

    def read(self, layer: nn.Module, x: Tensor, function: Callable[[Tensor], Any]) -> Any:
        found, layers = self._known.get(x, (None, {id(layer)}))
        if id(layer) in layers:
            found, layers = function(x), set()
            self._known[x] = found, layers
        layers.add(id(layer))
        return found


_once = _OncePerForward()


def _of_positions(
    layer: nn.Module, position_ids: Tensor | None, query: Tensor, keys: int
) -> Sequences | None:
    """The sequences whose positions start over, if any do."""
    batch, _, queries, _ = query.shape
    if position_ids is None or queries == 1 or keys < queries:
        return None
    if position_ids.shape not in ((batch, queries), (1, queries)):
        return None
    if is_compiling() or captures(query.device):
        return None
    begins = _once.read(layer, position_ids, lambda x: begins_of_runs(x.expand(batch, -1), 1))
    return from_begins(begins, batch, queries, keys, keys - queries)


def _lengths(layer: nn.Module, brief: Tensor, query: Tensor) -> tuple[int | None, Sequences | None]:
    """The window, and the sequences, if not one per batch."""
    batch, _, queries, _ = query.shape

    def read(brief: Tensor) -> tuple[int | None, Sequences | None]:
        numbers, windows = brief[:, 0].unbind(1)
        keys = brief.shape[-1]
        begins = begins_of_runs(numbers.expand(batch, -1), 0)
        pack = None
        if len(begins) > batch:
            found = [(_queries_before(end, queries, keys), end) for end in begins[1:]]
            kept = without_empty([*found, (batch * queries, batch * keys)])
            pack = Sequences([q for q, _ in kept], [k for _, k in kept], None)
        return int(windows[0, 0]) or None, pack

    window_and_pack: tuple[int | None, Sequences | None] = _once.read(layer, brief, read)
    return window_and_pack


def _queries_before(end: int, queries: int, keys: int) -> int:
    """How many queries come before a key, where each batch's queries are its last keys."""
    row, key = divmod(end, keys)
    return row * queries + max(0, key - (keys - queries))
