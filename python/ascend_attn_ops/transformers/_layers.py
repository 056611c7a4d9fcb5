"""Parts of the layers of every model that enable_dsa takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers.masking_utils import create_causal_mask

from ascend_attn_ops._core.arguments import wrong
from ascend_attn_ops.transformers._sequences import Sequences

# Models by their model_type. Others derive from them, with sinks, shared keys or other windows.
SERVED = frozenset({"axk2", "deepseek_v32", "deepseek_v4", "glm_moe_dsa"})
ANOTHER_INDEXER = (
    "its indexer or attention is of a kind that this library does not compute: call "
    "lightning_indexer, sparse_flash_attention and lightning_indexer_kl_loss in layers of your own"
)

# The argument for the cache: transformers 5.24 renames it, and still takes the old name.
CACHE = "cache" if "cache" in signature(create_causal_mask).parameters else "past_key_values"


def wrong_layer(
    layer: Any, attribute: str, expected: str, got: str, kind: type[Exception] = NotImplementedError
) -> Exception:
    return wrong(kind, "enable_dsa", f"layer {layer.layer_idx}'s {attribute}", expected, got)


def cache_of(arguments: Mapping[str, Any]) -> Any:
    return arguments.get(CACHE, arguments.get("past_key_values"))


@dataclass(frozen=True)
class Options:
    """The arguments of enable_dsa."""

    indexer_loss_weight: float | Tensor
    dense_warmup: bool
    indexer_dtype: torch.dtype | None


class State:
    """The state of a layer while it is enabled.

    Attributes:
        loss: of the indexer in the last forward.
        probe: a leaf whose gradient is the loss, where the backward knows it first: a compiled
            backward has no other way to tell it.
    """

    def __init__(self, options: Options, probe_on: torch.device | None = None) -> None:
        self.__setstate__((options, probe_on))

    def __getstate__(self) -> tuple[Options, torch.device | None]:
        return self.options, None if self.probe is None else self.probe.device

    def __setstate__(self, state: tuple[Options, torch.device | None]) -> None:
        self.options, probe_on = state
        self.loss: Tensor | None = None
        self.probe: Tensor | None = None
        if probe_on is not None:
            self.probe = torch.zeros((), device=probe_on, requires_grad=True)
            self.probe.register_post_accumulate_grad_hook(self._take)

    def _take(self, probe: Tensor) -> None:
        self.loss, probe.grad = probe.grad, None


@dataclass(frozen=True)
class Tokens:
    """Tells the layers of a model about its batch, in the place of a mask.

    Attributes:
        sequences: of layout TND; None for BSND without padding.
        every_key: in the dense warm-up the selection of all keys, (tokens..., 1, K).
        valid: (B, S), False for padding behind the tokens, for layers without sequences for it.
    """

    sequences: Sequences | None
    every_key: Tensor | None
    valid: Tensor | None = None

    def arrange(self, x: Tensor) -> Tensor:
        """(B, S, ...) in the layout of the operators."""
        return x if self.sequences is None else x.flatten(0, 1)

    def options(self) -> dict[str, Any]:
        if self.sequences is None:
            return {}
        return {
            "layout": "TND",
            "actual_seq_lengths_query": self.sequences.query_ends,
            "actual_seq_lengths_key": self.sequences.key_ends,
        }


class EnabledAttention(nn.Module):
    """A layer over this library's operators, which a layer of a model becomes by its class."""

    model: ClassVar[type[nn.Module]]
    """The part of a model that calls the layers and tells them about the tokens."""
    layer: ClassVar[tuple[type[nn.Module], type[EnabledLayer]] | None] = None
    """The class of the decoder layers that contain it, and what that becomes."""

    takes_padding: ClassVar[bool] = True

    layer_idx: int
    dsa: State

    @classmethod
    def check_layer(cls, layer: Any, options: Options) -> None:
        """Raises where a layer is not as transformers made it, or an option is not for it."""
        if layer.attention_dropout:
            got = f"{layer.attention_dropout}; set it to 0 when the model is made"
            raise wrong(NotImplementedError, "enable_dsa", "config.attention_dropout", "0", got)

    def state(self, options: Options) -> State:
        return State(options)

    def check_call(self, tokens: Any, arguments: dict[str, Any]) -> None:
        if not isinstance(tokens, Tokens):
            expected = "a call by the model, which tells its layers what is padding"
            got = type(tokens).__name__
            raise wrong(TypeError, "enable_dsa", "attention_mask", expected, got)
        if arguments.get("output_attentions"):
            expected = "False, as sparse attention never has all weights"
            got = "True; call disable_dsa(model) for them"
            raise wrong(NotImplementedError, "enable_dsa", "output_attentions", expected, got)


class EnabledLayer(nn.Module):
    """A decoder layer that contains such an attention, whose loss leaves a checkpoint as a result.

    torch.compile cannot set an attribute inside of one.
    """

    self_attn: nn.Module
    gradient_checkpointing: bool

    def _is_compiled_checkpoint(self) -> bool:
        enabled = isinstance(self.self_attn, EnabledAttention)
        return enabled and is_compiling() and self.gradient_checkpointing and self.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_compiled_checkpoint():
            return super().forward(*args, **kwargs)
        losses: list[Tensor] = []
        results = super().forward(*args, indexer_losses=losses, **kwargs)
        return results, tuple(losses)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        results = super().__call__(*args, **kwargs)
        if not self._is_compiled_checkpoint():
            return results
        results, losses = results
        for loss in losses:
            self.self_attn.dsa.loss = loss  # type: ignore[union-attr]
        return results
