"""enable_dsa and disable_dsa: sparse attention in models of transformers, and back."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers import GenerationMixin
from transformers.masking_utils import create_masks_for_generate

from ascend_attn_ops._core.arguments import shown, wrong
from ascend_attn_ops._core.patches import Patch
from ascend_attn_ops.transformers import _sequences
from ascend_attn_ops.transformers._layers import (
    ANOTHER_INDEXER,
    CACHE,
    EnabledAttention,
    Options,
    Tokens,
    cache_of,
)

# For each class of layers, the class here that it becomes, whose module is imported only then.
_DEEPSEEK = "transformers.models.deepseek_v32.modeling_deepseek_v32"
_DEEPSEEK_V4 = "transformers.models.deepseek_v4.modeling_deepseek_v4"
_GLM = "transformers.models.glm_moe_dsa.modeling_glm_moe_dsa"
_AXK2 = "transformers.models.axk2.modeling_axk2"
_LAYERS = {
    (_AXK2, "AXK2Attention"): ("_axk2", "AXK2SparseAttention"),
    (_DEEPSEEK, "DeepseekV32Attention"): ("_deepseek_v32", "DeepseekV32SparseAttention"),
    (_DEEPSEEK_V4, "DeepseekV4Attention"): ("_deepseek_v4", "DeepseekV4CompressedAttention"),
    (_GLM, "GlmMoeDsaAttention"): ("_glm_moe_dsa", "GlmMoeDsaSparseAttention"),
}
_MASK = "indexed_attention"
_WHERE = "enable_dsa", "attention_mask"
_ARGUMENTS = "input_ids", "attention_mask", "position_ids", CACHE, "inputs_embeds", "use_cache"


class _Frozen(nn.Parameter):
    """A parameter that the dense warm-up does not train. Setting requires_grad takes it over."""

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        self.__class__ = nn.Parameter  # type: ignore[assignment]
        return self.requires_grad_(requires_grad)

    requires_grad = property(lambda self: False, requires_grad_)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: object) -> Any:
        return _Frozen, (self.data, False)


def enable_dsa(
    model: nn.Module,
    *,
    indexer_loss_weight: float | Tensor = 1.0,
    dense_warmup: bool = False,
    indexer_dtype: torch.dtype | None = None,
) -> None:
    """Let DeepSeek-V3.2, DeepSeek-V4, GLM-MoE-DSA or A.X-K2 attend, and train their indexers.

    Changes the model in place: every attention layer becomes absorbed attention over the keys that
    :func:`ascend_attn_ops.lightning_indexer` selects. Where gradients are computed, the KL loss of
    each indexer is attached to its layer's output (:func:`ascend_attn_ops.attach_loss`). Any
    trainer of the model also trains the indexers; transformers itself never trains them.
    Parameters, config, caches, generate(), gradient checkpointing, padding masks and packed
    sequences remain as they are; under torch.compile, pass the lengths of packed sequences as
    cu_seq_lens_q. The logits are those of transformers up to rounding. If scores tie at the last
    selected key, this library selects the earlier key; torch.topk may select either.

    Call it before the model is wrapped (DistributedDataParallel, FSDP) and before the optimizer is
    made; LoRA adapters may come before or after. Forward hooks on kv_b_proj are not called. Call it
    again to change the options, as between the phases of a training.

    In DeepSeek-V4 every layer attends by :func:`ascend_attn_ops.sparse_flash_mla`. Padding before a
    text is refused, and packed sequences are compressed each by itself. Neither packs nor padding
    behind a text make a cache. The indexers learn in the backward
    (:func:`ascend_attn_ops.sparse_flash_mla_with_indexer_loss`).

    The model gets a method ``indexer_losses()``: for each layer with an indexer, by its number,
    the mean KL loss of the last forward in nats per token, without a gradient. It is empty without
    gradients, in eval mode and with a cache. For DeepSeek-V4 it is known after the backward.

    Args:
        model: a model of transformers, or one that holds such a model.
        indexer_loss_weight: factor of the losses' gradients. A trainer that accumulates gradients
            over n batches and divides its loss by n does not divide this one: 1 / n does. A tensor
            with one element may be changed between steps.
        dense_warmup: the attention sees all keys, and only the indexers learn: every other
            parameter is frozen until the next call, and nothing flows back through the model. Not
            for DeepSeek-V4.
        indexer_dtype: in which the operators get the indexer's queries, keys and weights. None: the
            queries and keys in the attention's, and the weights, as in transformers, in float32.

    Raises:
        ValueError: the model has no layers of these kinds.
        NotImplementedError: a layer is not as transformers made it (adapters, quantization; in the
            forward, tensor parallelism), config.attention_dropout is not 0, or its model has no
            such option; in the forward of DeepSeek-V4, padding, or a cache without compressed keys.

    Example:
        >>> import torch, transformers
        >>> from ascend_attn_ops.transformers import enable_dsa
        >>> config = transformers.DeepseekV32Config(
        ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        ...     num_attention_heads=32, num_key_value_heads=32, q_lora_rank=32, index_n_heads=8,
        ...     index_topk=1024, max_position_embeddings=64)
        >>> model = transformers.DeepseekV32ForCausalLM(config).bfloat16()
        >>> enable_dsa(model)
        >>> tokens = torch.randint(64, (1, 16))
        >>> model(tokens, labels=tokens).loss.backward()
        >>> list(model.indexer_losses())
        [0]
        >>> model.model.layers[0].self_attn.indexer.wk.weight.grad.shape
        torch.Size([128, 32])
    """
    layers: list[Any] = [
        module
        for module in model.modules()
        if _name_of(module) in _LAYERS or isinstance(module, EnabledAttention)
    ]
    if not layers:
        names = ", ".join(name for _, name in _LAYERS)
        indexed = any(getattr(module, "indexer", None) is not None for module in model.modules())
        dense = 'for dense models call register() and use attn_implementation="ascend"'
        got = f"none in {type(model).__name__}; {ANOTHER_INDEXER if indexed else dense}"
        raise wrong(ValueError, "enable_dsa", "model", f"attention layers of {names}", got)
    options = Options(indexer_loss_weight, dense_warmup, indexer_dtype)
    for layer in layers:
        _kind_of(layer).check_layer(layer, options)
    disable_dsa(model)

    with Patch() as patch:
        patch.set_attribute(model, "_ascend_dsa", patch)
        for layer in layers:
            _set_class(patch, layer, _kind_of(layer))
            patch.set_attribute(layer, "dsa", layer.state(options))
        kinds = {type(layer).model: type(layer) for layer in layers}
        becomes = dict(kind.layer for kind in kinds.values() if kind.layer is not None)
        for base in [*model.modules()]:
            if type(base) in becomes:
                _set_class(patch, base, becomes[type(base)])
            if type(base) in kinds:
                describe = partial(_describe_tokens, kinds[type(base)].takes_padding, dense_warmup)
                hook = base.register_forward_pre_hook(describe, with_kwargs=True)
                patch.on_undo(hook.remove)
                if dense_warmup:
                    _cut_gradients(patch, base)
        if dense_warmup:
            indexers = {x for layer in layers if layer.indexer for x in layer.indexer.parameters()}
            for parameter in model.parameters():
                if parameter.requires_grad and parameter not in indexers:
                    parameter.requires_grad_(False)
                    if type(parameter) is nn.Parameter:
                        parameter.__class__ = _Frozen
                    patch.on_undo(_unfreeze, parameter, type(parameter))
        if isinstance(model, GenerationMixin):
            takes_padding = all(kind.takes_padding for kind in kinds.values())
            masks = _masks_for_generate if takes_padding else _given_mask
            patch.set_attribute(model, "create_masks_for_generate", masks)
        patch.set_attribute(model, "indexer_losses", partial(_indexer_losses, model))


def _set_class(patch: Patch, module: nn.Module, kind: type[nn.Module]) -> None:
    before = type(module)
    module.__class__ = kind
    patch.on_undo(_restore_class, module, kind, before)


def _unfreeze(parameter: nn.Parameter, kind: type[nn.Parameter]) -> None:
    if type(parameter) is kind:
        parameter.requires_grad_()


def _restore_class(module: nn.Module, kind: type[nn.Module], before: type[nn.Module]) -> None:
    # FSDP2 gives modules a class of its own.
    if type(module) is kind:
        module.__class__ = before


def disable_dsa(model: nn.Module) -> None:
    """Undo :func:`enable_dsa`: the model is transformers' again, and nothing is frozen by it.

    Parameters that you have frozen meanwhile stay frozen.
    """
    # Its own model, or a wrapper's: torch.compile keeps our attributes in the inner model.
    for enabled in [x for x in model.modules() if "_ascend_dsa" in vars(x)]:
        vars(enabled)["_ascend_dsa"].undo()
    if any(isinstance(layer, EnabledAttention) for layer in model.modules()):
        got = f"a part of it, {type(model).__name__}"
        raise wrong(ValueError, "disable_dsa", "model", "the argument of enable_dsa", got)


def _name_of(module: nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__name__


def _kind_of(layer: Any) -> type[EnabledAttention]:
    """The class that a layer becomes, or has become."""
    if isinstance(layer, EnabledAttention):
        return type(layer)
    module, kind = _LAYERS[_name_of(layer)]
    found: type[EnabledAttention] = getattr(import_module(f"{__package__}.{module}"), kind)
    return found


def _indexer_losses(model: nn.Module) -> dict[int, Tensor]:
    """The mean KL loss of each indexer in the last forward, by the number of its layer."""
    return {
        layer.layer_idx: loss
        for layer in model.modules()
        if isinstance(layer, EnabledAttention) and (loss := layer.dsa.loss) is not None
    }


def _masks_for_generate(
    inputs_embeds: Tensor, attention_mask: Tensor | None = None, **others: Any
) -> Any:
    """Skips the mask of all pairs that generate() builds for the prompt with a static cache.

    The mask of a single token is small, and torch.compile needs it to keep its shape.
    """
    if inputs_embeds.shape[1] > 1:
        return attention_mask
    return create_masks_for_generate(
        inputs_embeds=inputs_embeds, attention_mask=attention_mask, **others
    )


def _given_mask(inputs_embeds: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Any:
    """In the place of the masks of all pairs that generate() builds."""
    return attention_mask


def _cut_gradients(patch: Patch, base: Any) -> None:
    """In the dense warm-up gradients pass the layers on their residual path only.

    There they reach the losses that are attached to the attention's outputs. They start at the
    embeddings: reentrant checkpointing wants an input with a gradient.
    """
    for layer in base.layers:
        patch.on_undo(layer.mlp.register_forward_hook(_without_gradients).remove)
    # A later stage of a pipeline has no embeddings, and gets what another embedded.
    if base.embed_tokens is not None:
        patch.on_undo(base.embed_tokens.register_forward_hook(_start_gradients).remove)


def _without_gradients(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.detach()


def _start_gradients(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.detach().requires_grad_() if torch.is_grad_enabled() else output


def _describe_tokens(
    takes_padding: bool,
    dense_warmup: bool,
    base: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[()], dict[str, Any]]:
    """Pass a description of the sequences to a model's forward, instead of a mask."""
    kwargs = {**kwargs, **dict(zip(_ARGUMENTS[: len(args)], args, strict=True))}
    for layer in base.layers:
        layer.self_attn.dsa.loss = None
    every_key = valid = None
    if takes_padding:
        sequences, keys = _sequences_of(base, kwargs)
    else:
        (sequences, valid), keys = _unpadded(base, kwargs), 0
    if dense_warmup:
        if kwargs.get("inputs_embeds") is not None:
            kwargs["inputs_embeds"] = _start_gradients(base, (), kwargs["inputs_embeds"])
        every_key = _sequences.every_key(sequences, _input_of(kwargs), keys)
    return (), {**kwargs, "attention_mask": {_MASK: Tokens(sequences, every_key, valid)}}


def _input_of(kwargs: dict[str, Any]) -> Tensor:
    given = kwargs.get("inputs_embeds")
    return kwargs["input_ids"] if given is None else given


def _sequences_of(base: Any, kwargs: dict[str, Any]) -> tuple[_sequences.Sequences | None, int]:
    """The sequences that transformers would see, and the number of keys of a batch."""
    batch, queries = _input_of(kwargs).shape[:2]
    device = _input_of(kwargs).device
    mask, cache = kwargs.get("attention_mask"), cache_of(kwargs)
    if isinstance(mask, dict):
        mask = mask[_MASK]
    offset, keys = 0, queries
    if cache is not None:
        offset, keys = cache.get_query_offset(0), cache.get_mask_sizes(queries, 0)[0]
    if mask is None:
        packed = _packed(base, kwargs, keys, offset)
        if packed is not None:
            return packed, keys
        if not isinstance(offset, Tensor) and offset + queries == keys:
            return None, keys
        valid = (torch.arange(keys, device=device) < offset + queries).expand(batch, keys)
    elif mask.ndim == 2:
        valid = mask.to(device, torch.bool)
        fewest = 0 if is_compiling() else int(offset) + queries
        if valid.shape[0] != batch or not fewest <= valid.shape[-1] <= keys:
            expected = f"{batch} rows of {fewest}..{keys} columns, the tokens and what is cached"
            raise wrong(ValueError, *_WHERE, expected, str(tuple(valid.shape)))
        # A cache with room: what is not there yet is as good as padding.
        valid = torch.nn.functional.pad(valid, (0, keys - valid.shape[-1]))
    else:
        valid = _sequences.valid_keys(mask, queries, offset).expand(batch, -1)
    if not is_compiling() and bool(valid.all()):
        return _packed(base, kwargs, keys, offset), keys
    return _sequences.padded(valid, queries, offset), keys


def _unpadded(
    base: Any, kwargs: dict[str, Any]
) -> tuple[_sequences.Sequences | None, Tensor | None]:
    """The sequences of a pack, or the tokens that are no padding, for layers that compress keys.

    They take neither beside a cache, nor padding before tokens.
    """
    queries = _input_of(kwargs).shape[1]
    mask, cache = kwargs.get("attention_mask"), cache_of(kwargs)
    valid = None
    if mask is not None and not (mask.ndim == 2 and not is_compiling() and bool(mask.all())):
        if mask.ndim == 2 and not is_compiling() and cache is None:
            valid = mask.to(_input_of(kwargs).device, torch.bool)
        if valid is None or bool((valid.int().diff(dim=-1) > 0).any()):
            expected = (
                "no padding that DeepSeek-V4 would compress as text: sequences of one length, "
                "padding behind them and no cache, or packed sequences; none under torch.compile"
            )
            raise wrong(NotImplementedError, *_WHERE, expected, shown(mask))
    found = _packed(base, kwargs, queries, 0) if valid is None else None
    if found is not None and cache is not None:
        expected = "None beside packed sequences, which DeepSeek-V4 compresses each by itself"
        got = "a cache; pass use_cache=False"
        raise wrong(NotImplementedError, "enable_dsa", CACHE, expected, got)
    if found is not None or valid is not None:
        kwargs["use_cache"] = False
    # Compressed keys begin anew in each sequence, on the host.
    return None if found is None else _sequences.on_host(found), valid


def _packed(
    base: Any, kwargs: dict[str, Any], keys: int, offset: int | Tensor
) -> _sequences.Sequences | None:
    """The sequences of a pack: what a collator says, or what positions do that start over."""
    batch, queries = _input_of(kwargs).shape[:2]
    found = _sequences.of_collator("enable_dsa", kwargs, queries, keys)
    positions = kwargs.get("position_ids")
    if found is not None or positions is None or queries == 1:
        return found
    if is_compiling():
        # Reading breaks a graph, and so is for where transformers finds packs: without a cache.
        wanted = kwargs.get("use_cache")
        wanted = base.config.use_cache if wanted is None else wanted
        if cache_of(kwargs) is not None or (
            wanted and not (base.gradient_checkpointing and base.training)
        ):
            return None
    return _sequences.packed(positions.expand(batch, queries), keys, int(offset))
