"""Parts of the layers of every model that enable_dsa takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ascend_attn_ops.integrations.transformers._sequences import Sequences


@dataclass(frozen=True)
class Options:
    """The arguments of enable_dsa."""

    indexer_loss_weight: float | Tensor
    dense_warmup: bool
    indexer_dtype: torch.dtype | None


@dataclass(frozen=True)
class Tokens:
    """Tells the layers of a model about its batch, in the place of a mask.

    Attributes:
        sequences: of layout TND; None for BSND without padding.
        every_key: in the dense warm-up the selection of all keys, (tokens..., 1, K).
    """

    sequences: Sequences | None
    every_key: Tensor | None

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
    original: ClassVar[type[Any]]
    """The layers' own class."""

    takes_padding: ClassVar[bool] = True

    layer_idx: int
    dsa_options: Options
    indexer_loss: Tensor | None

    @classmethod
    def check_layer(cls, layer: Any, options: Options) -> None:
        """Raises where a layer is not as transformers made it, or an option is not for it."""
        if layer.attention_dropout:
            raise NotImplementedError(
                "enable_dsa: config.attention_dropout: expected 0, got "
                f"{layer.attention_dropout}: the sparse operators have no dropout; set it to 0 "
                "when the model is made"
            )

    def check_call(self, tokens: Any, arguments: dict[str, Any]) -> None:
        if not isinstance(tokens, Tokens):
            raise TypeError(
                "enable_dsa: the layers of a model must be called by the model, which says what "
                f"is padding; got an attention_mask of type {type(tokens).__name__}"
            )
        if arguments.get("output_attentions"):
            raise NotImplementedError(
                "enable_dsa: output_attentions: the attention weights of sparse attention never "
                "exist as a matrix; call disable_dsa(model) for them"
            )
