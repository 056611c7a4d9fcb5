"""The operators as the public functions call them: all arguments of the schema, in its order.

To find its arguments in the schema takes torch.ops longer than a small operator runs. Plain ones go
straight to the dispatcher (csrc/direct_call.h); all others, and what torch.compile traces, go
through torch.ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ascend_attn_ops import _C


def _operator(name: str) -> Callable[..., Any]:
    direct = getattr(_C, name)
    overload = getattr(torch.ops.ascend, name).default
    arguments = overload._schema.arguments
    keywords = [argument.name for argument in arguments if argument.kwarg_only]
    positional = len(arguments) - len(keywords)

    def call(*args: Any) -> Any:
        if not is_dynamo_compiling():
            result = direct(*args)
            if result is not NotImplemented:
                return result
        return overload(*args[:positional], **dict(zip(keywords, args[positional:], strict=True)))

    return call


flash_attention_score = _operator("flash_attention_score")
flash_attention_score_grad = _operator("flash_attention_score_grad")
lightning_indexer = _operator("lightning_indexer")
lightning_indexer_grad = _operator("lightning_indexer_grad")
prompt_flash_attention = _operator("prompt_flash_attention")
scatter_pa_kv_cache_ = _operator("scatter_pa_kv_cache_")
sparse_flash_attention = _operator("sparse_flash_attention")
sparse_flash_attention_grad = _operator("sparse_flash_attention_grad")
sparse_lightning_indexer_grad_kl_loss = _operator("sparse_lightning_indexer_grad_kl_loss")
