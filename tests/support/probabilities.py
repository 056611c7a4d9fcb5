"""Reads the attention weights P that a forward and its backward use. A value, or an incoming
gradient, that is 1 in one channel and 0 in the others shows one weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from ascend_attn_check.samples import flash_attention_score, sparse_flash_attention
from ascend_attn_ops import reference
from ascend_attn_ops.reference.bounds.expected import VANISHING
from ascend_attn_ops.reference.bounds.flash_attention_score import head_counts
from ascend_attn_ops.reference.call import Outputs
from ascend_attn_ops.reference.operators.flash_attention_score import from_heads, to_heads
from torch import Tensor

from support.samples import Sample

# How far rounding may move a weight: in half types that of the weight itself, before its division
# by the sum in the forward and after it in the backward; in the others that of rescaling the
# earlier ones of several blocks of keys.
ROUNDING = {
    # The forward may round a weight up and its result too, by 2^-8 each, the backward both down.
    torch.bfloat16: ((1 + 2**-8) / (1 - 2**-8)) ** 2 - 1,
    torch.float16: 2**-10,
    torch.float32: 2**-16,
    torch.float64: 2**-43,
}
# Half the distance of 1 to the next number of the dtype.
UNIT = {x: torch.finfo(x).eps / 2 for x in ROUNDING}


@dataclass(frozen=True)
class Probabilities:
    """Rows of P as float64; `outputs` are those of the forward, with any values."""

    forward: Tensor
    backward: Tensor
    outputs: Outputs
    dtype: torch.dtype
    # 1 where a row has a key and 0 elsewhere, by the reference.
    sums: Tensor

    def assert_same(self, exact: bool = False) -> None:
        """`exact`: with the same bits, which weights have that are neither rounded nor rescaled."""
        x, y = self.forward, self.backward
        smallest = torch.finfo(self.dtype).smallest_normal * torch.finfo(self.dtype).eps
        allowed = ROUNDING[self.dtype] * x + max(2 * smallest, VANISHING)
        if exact:
            allowed = torch.zeros_like(x)
        differ = ~(((x - y).abs() <= allowed) | (x.isnan() & y.isnan()))
        if bool(differ.any()):
            at = tuple(int(i) for i in differ.nonzero()[0])
            raise AssertionError(
                f"{int(differ.sum())} of {x.numel()} weights differ: at {at} the forward has "
                f"{float(x[at]):.9g}, the backward {float(y[at]):.9g}"
            )

    def assert_rows_add_up(self) -> None:
        """To 1, or 0 without keys, but for the rounding of a sum of so many."""
        units = 8 + self.forward.shape[-1] ** 0.5
        for weights in (self.forward, self.backward):
            error = (weights.sum(-1) - self.sums).abs().nan_to_num(torch.inf)
            if error.numel():
                largest = float(error.max())
                assert largest <= units * UNIT[self.dtype], f"a row's sum is off by {largest}"


def unit_rows(count: int, size: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """For slices of up to `size` of `count` rows: rows of which number i is 1 in channel i of the
    slice; those outside it are 0."""
    for first in range(0, count, size):
        part = slice(first, min(count, first + size))
        rows = torch.zeros(count, size, dtype=dtype)
        rows[part].fill_diagonal_(1)
        yield part, rows


def rows_with_keys(sample: Sample) -> Tensor:
    """Returns the reference's output for values of 1: 1 in rows with keys, 0 in the others."""
    ones = sample.replace(value=torch.ones_like(sample.inputs["value"]))
    return ones.double().call(reference)[0].round()


def dense(sample: Sample) -> Probabilities:
    """Weights of flash_attention_score, in (B, N, Sq, Skv), or in TND (1, N, T1, T2)."""
    a = sample.exact_arguments()
    heads, key_heads = head_counts(a)
    queries = to_heads(sample.inputs["query"], heads, a.layout).shape[2]
    batch, _, keys, size = to_heads(sample.inputs["value"], key_heads, a.layout).shape
    rows, dtype = heads // key_heads * queries, sample.inputs["query"].dtype
    forward = torch.zeros(batch, heads, queries, keys, dtype=torch.float64)
    backward = torch.zeros(batch, key_heads, rows, keys, dtype=torch.float64)
    outputs = sample.call(torch.ops.ascend)
    for part, unit in unit_rows(keys, size, dtype):
        value = from_heads(unit.expand(batch, key_heads, -1, -1), a.layout)
        outputs = sample.replace(value=value).call(torch.ops.ascend)
        out = to_heads(outputs[0], heads, a.layout)
        forward[..., part] = out[..., : part.stop - part.start].double()
    for part, unit in unit_rows(rows, size, dtype):
        d_out = unit.expand(batch, key_heads, -1, -1).reshape(batch, heads, queries, size)
        call = flash_attention_score.gradient_call(sample, outputs, from_heads(d_out, a.layout))
        d_value = to_heads(call.call(torch.ops.ascend)[2], key_heads, a.layout)
        backward[:, :, part] = d_value[..., : part.stop - part.start].transpose(2, 3).double()
    sums = to_heads(rows_with_keys(sample), heads, a.layout)[..., 0]
    return Probabilities(forward, backward.view_as(forward), outputs, dtype, sums)


def sparse(sample: Sample) -> Probabilities:
    """Weights of sparse_flash_attention in BSND, in (B, Sq, N, Skv)."""
    query, value = sample.inputs["query"], sample.inputs["value"]
    (batch, queries, heads, size), keys, dtype = query.shape, value.shape[1], query.dtype
    rows = queries * heads
    forward = torch.zeros(batch, queries, heads, keys, dtype=torch.float64)
    backward = torch.zeros(batch, rows, keys, dtype=torch.float64)
    outputs = sample.call(torch.ops.ascend)
    for part, unit in unit_rows(keys, size, dtype):
        unit_values = unit[:, None].expand(batch, -1, -1, -1).contiguous()
        outputs = sample.replace(value=unit_values).call(torch.ops.ascend)
        forward[..., part] = outputs[0][..., : part.stop - part.start].double()
    for part, unit in unit_rows(rows, size, dtype):
        d_out = unit.expand(batch, -1, -1).reshape(batch, queries, heads, size)
        call = sparse_flash_attention.gradient_call(sample, outputs, d_out)
        d_value = call.call(torch.ops.ascend)[2].squeeze(2)
        backward[:, part] = d_value[..., : part.stop - part.start].transpose(1, 2).double()
    sums = rows_with_keys(sample)[..., 0]
    return Probabilities(forward, backward.view_as(forward), outputs, dtype, sums)
