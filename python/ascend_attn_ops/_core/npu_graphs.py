"""Calls that torch.npu.NPUGraph captures, and the lengths that it updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops._core.torch_npu_private import graph_handlers
from ascend_attn_ops._core.torch_private import tree_map_only

# Operators whose lengths are on the host, and a part of the launch.
_OPERATORS = (
    "flash_attention_score",
    "flash_attention_score_grad",
    "_flash_attention_score_extended_grad",
    "prompt_flash_attention",
    "fused_infer_attention_score",
)
# CANN takes no strides for these.
_DENSE = ("prompt_flash_attention", "fused_infer_attention_score")
_HANDLED = [f"{x}.{overload}" for x in _OPERATORS for overload in ("default", "relaunch")]
_LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")


def captures(device: torch.device) -> bool:
    """Whether calls with tensors of this device become part of a graph, and run later."""
    npu: Any = getattr(torch, "npu", None)
    return (
        device.type == "npu"
        and hasattr(npu, "is_current_stream_capturing")
        and bool(npu.is_current_stream_capturing())
    )


def register_handlers() -> None:
    """Let `NPUGraph.update` change the lengths of our operators, as it does those of torch_npu's.

    torch_npu launches the call again, with the outputs that the handler has made for it. Calling
    this again has no effect; `unregister_handlers` undoes it.
    """
    unregister_handlers()
    npu: Any = getattr(torch, "npu", None)
    register = getattr(npu, "register_npu_graph_handler", None)
    base: Any = getattr(npu, "NpuGraphOpHandler", None)
    if register is None or base is None:  # an older torch_npu
        return

    class LengthsHandler(base):  # type: ignore[misc]
        UPDATE_SPECS = {  # noqa: RUF012 - as torch_npu declares it
            f"{operator}.relaunch": [("kwarg", name, name) for name in _LENGTHS]
            for operator in _OPERATORS
        }

        @classmethod
        def should_handle(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
            return func.namespace == "ascend" and any(kwargs.get(x) is not None for x in _LENGTHS)

        @classmethod
        def prepare_capture(
            cls, func: Any, args: Any, kwargs: dict[str, Any]
        ) -> tuple[Any, Any, dict[str, Any]]:
            device = args[0].device
            if func.__name__.partition(".")[0] in _DENSE:
                args, kwargs = tree_map_only(Tensor, Tensor.contiguous, (args, kwargs))
            on_meta = tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
            outputs = func(*on_meta[0], **on_meta[1])
            made = [
                torch.empty(x.shape, dtype=x.dtype, device=device)
                for x in ([outputs] if isinstance(outputs, Tensor) else outputs)
            ]
            # The first launch gives it elements, as many as the function asks for.
            workspace = torch.empty(0, dtype=torch.uint8, device=device)
            with_outputs = getattr(torch.ops.ascend, func.__name__.partition(".")[0]).relaunch
            return with_outputs, args, {**kwargs, "workspace": workspace, "out": made}

        @classmethod
        def update_args(cls, dispatch_record: Any, update_input: dict[str, Any]) -> None:
            tensors = {
                name: torch.tensor(x, dtype=torch.int64, device="cpu")
                if name in _LENGTHS and x is not None and not isinstance(x, Tensor)
                else x
                for name, x in update_input.items()
            }
            super().update_args(dispatch_record, tensors)

        @classmethod
        def postprocess_result(cls, result: Any, kwargs: dict[str, Any]) -> Any:
            outputs = kwargs["out"]
            if kwargs.get("return_softmax_lse"):
                _mark_rows_without_keys(outputs[1], kwargs)
            return outputs[0] if len(outputs) == 1 else tuple(outputs)

    register(_HANDLED)(LengthsHandler)


def _mark_rows_without_keys(softmax_lse: Tensor, kwargs: dict[str, Any]) -> None:
    """Replace the device's marks by -inf or the sink, as a call outside a graph does."""
    sink, packed = kwargs.get("sink"), softmax_lse.dim() == 3
    value = softmax_lse.new_full((), -torch.inf)
    if sink is not None:
        value = sink.to(softmax_lse.dtype).view((1, -1, 1) if packed else (1, -1, 1, 1))
    marked = softmax_lse.abs() >= torch.finfo(torch.float32).max
    softmax_lse.copy_(torch.where(marked, value, softmax_lse))


def unregister_handlers() -> None:
    for name in _HANDLED:
        graph_handlers().pop(name, None)
