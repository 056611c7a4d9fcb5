"""The sparse operators of torch_npu and of vLLM-Ascend: what they refuse beside ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import wrong
from ascend_attn_ops._core.device_limits import device_in_force
from ascend_attn_ops.torch_npu.translation import unsupported

_PAGED = "PA_BSND"


def attention(
    name: str, value: Tensor | None, layout: str, layout_kv: str, block_table: Tensor | None,
    return_softmax_lse: bool, query_rope: Tensor | None, **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check_rope(name, query_rope)
    options["query_rope"] = query_rope
    tensors = (_given(name, value), *(x for x in options.values() if isinstance(x, Tensor)))
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors) and not return_softmax_lse:
        expected = "True where a gradient is required, whose backward reads the statistics"
        raise wrong(ValueError, name, "return_softmax_lse", expected, "False")
    if layout_kv != _PAGED:
        _check_one_layout(name, "layout_kv", layout, layout_kv, block_table)
    elif return_softmax_lse and name.startswith("npu::"):  # vLLM-Ascend's operator returns them
        raise unsupported(name, "return_softmax_lse", f"False beside layout_kv {_PAGED}", True)
    return torch.ops.ascend.sparse_flash_attention(
        value=value, layout=layout, layout_kv=layout_kv, block_table=block_table,
        return_softmax_lse=return_softmax_lse, **options,
    )  # fmt: skip


def attention_over_int8(
    name: str, layout: str, layout_kv: str, block_table: Tensor | None, **options: Any
) -> Tensor | tuple[Tensor, ...]:
    if layout_kv != _PAGED:
        _check_one_layout(name, "layout_kv", layout, layout_kv, block_table)
    out: Tensor = torch.ops.ascend.kv_quant_sparse_flash_attention(
        layout=layout, layout_kv=layout_kv, block_table=block_table, **options
    )
    if name.startswith("npu::"):
        return out
    return out, *(out.new_empty(0, dtype=torch.float32) for _ in range(2))


def attention_grad(name: str, value: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
    return torch.ops.ascend.sparse_flash_attention_grad(value=_given(name, value), **options)


def loss(name: str, query_rope: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
    _check_rope(name, query_rope)
    return torch.ops.ascend.sparse_lightning_indexer_grad_kl_loss(query_rope=query_rope, **options)


def indexer(
    name: str, layout: str, layout_key: str, block_table: Tensor | None, return_values: bool,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if layout_key != _PAGED:
        _check_one_layout(name, "layout_key", layout, layout_key, block_table)
    elif return_values:
        raise unsupported(name, "return_value", f"False beside layout_key {_PAGED}", True)
    return torch.ops.ascend.lightning_indexer(
        layout=layout, layout_key=layout_key, block_table=block_table, return_values=return_values,
        **options,
    )  # fmt: skip


def quant_indexer(
    name: str, layout: str, layout_key: str, block_table: Tensor | None, **options: Any
) -> Tensor:
    if layout_key != _PAGED:
        _check_one_layout(name, "layout_key", layout, layout_key, block_table)
    return torch.ops.ascend.quant_lightning_indexer(
        layout=layout, layout_key=layout_key, block_table=block_table, **options
    )


def _check_rope(name: str, query_rope: Tensor | None) -> None:
    """Our operators pass zeros to CANN's functions; torch_npu passes what it is given."""
    if query_rope is None and device_in_force() is not None:
        expected = "a tensor, without which CANN refuses the call"
        got = "None; torch.ops.ascend takes the same call"
        raise wrong(ValueError, name, "query_rope", expected, got)


def _given(name: str, value: Tensor | None) -> Tensor:
    if value is None:
        raise unsupported(name, "value", "a tensor", None)
    return value


def _check_one_layout(
    name: str, argument: str, layout_query: str, layout: str, block_table: Tensor | None
) -> None:
    if layout != layout_query:
        raise unsupported(name, argument, f"{_PAGED} or layout_query, {layout_query}", layout)
    if block_table is not None:
        raise wrong(ValueError, name, "block_table", f"None beside {argument} {layout}", "a tensor")
