"""Bounds on the results of kv_quant_sparse_flash_attention: rounding the keys is part of what it
computes, and the rest is sparse_flash_attention."""

from __future__ import annotations

from inspect import signature

from ascend_attn_ops.reference.bounds import sparse_flash_attention
from ascend_attn_ops.reference.bounds.expected import Expected
from ascend_attn_ops.reference.call import Sample
from ascend_attn_ops.reference.declaration import Arguments
from ascend_attn_ops.reference.operators.kv_quant_sparse_flash_attention import (
    dequantised,
    kv_quant_sparse_flash_attention,
)


def expected(sample: Sample) -> list[Expected]:
    call = signature(kv_quant_sparse_flash_attention).bind(*sample.args, **sample.options)
    call.apply_defaults()
    arguments = dequantised(Arguments(**call.arguments))
    inputs = {name: arguments.pop(name) for name in ("query", "key", "value", "sparse_indices")}
    dense = Sample("sparse_flash_attention", sample.id, inputs, arguments)
    return sparse_flash_attention.expected(dense)[:1]
