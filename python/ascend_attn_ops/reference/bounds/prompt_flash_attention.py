"""Bounds on the results of prompt_flash_attention."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from ascend_attn_ops import reference
from ascend_attn_ops.reference.bounds.expected import (
    OF_TERMS,
    Expected,
    half_ulp,
    largest_score,
    magnitude,
    within,
)
from ascend_attn_ops.reference.call import Sample
from ascend_attn_ops.reference.operators.flash_attention_score import from_heads, to_heads
from ascend_attn_ops.reference.operators.prompt_flash_attention import (
    quantized,
    read_scale,
    saturated,
)


@dataclass(frozen=True)
class ExpectedOfInt8(Expected):
    """A weight or an output that is rounded the other way is one step: a share of the elements, or
    of the rows, may be farther off than `allowed`, but by no more than `step`."""

    step: float
    share: float
    of_rows: bool
    # By how many standard deviations a random sample may exceed the share.
    deviations: float = 0.0
    # The lowest and the highest of each element, if they are known.
    limits: tuple[Tensor, Tensor] | None = None

    def check(self, actual: Tensor) -> None:
        x, y = actual.double(), self.exact.double()
        assert x.shape == y.shape, f"{self.name}: {list(x.shape)} against {list(y.shape)}"
        if self.limits is not None:
            lowest, highest = self.limits
            outside = (actual < lowest) | (actual > highest)
            assert not outside.any(), f"{self.name}: {int(outside.sum())} of {x.numel()} are wrong"
            if self.deviations:
                # Elements of expanded random inputs are off together: their share says nothing.
                return
        off = ~((x - y).abs() <= self.allowed)
        farthest = float((x - y).abs().max()) if x.numel() else 0.0
        if self.of_rows:
            off = off.any(-1)
        most = self.share * off.numel()
        most += self.deviations * sqrt(most) + (1 if self.deviations else 0)
        assert not off.any() or (int(off.sum()) <= most and farthest <= self.step), (
            f"{self.name}: {int(off.sum())} of {off.numel()} are off, by at most {farthest:.3g}, "
            f"one step is {self.step:.3g}"
        )


def expected(sample: Sample) -> list[Expected]:
    exact, dtype = sample.double(), sample.inputs["query"].dtype
    (out,) = exact.call(reference)
    if out.dtype == torch.int8:
        limits = None if dtype == torch.int8 else limits_of_int8(sample)
        zero = torch.zeros(())
        return [ExpectedOfInt8("out", out, zero, 1, share=0.03, of_rows=False, limits=limits)]
    if dtype == torch.int8:
        # Sums of integers, divided by one of float32, and rounded here and in the reference.
        rounded = out.double()
        allowed = OF_TERMS[torch.float32] * rounded.abs() + 2 * half_ulp(rounded, out.dtype)
        # One step of one weight changes an output by this at most: the weights sum to at least one.
        step = 1.01 * 128 * abs(read_scale(sample.options["deq_scale2"])) + 1e-3
        return [ExpectedOfInt8("out", out, allowed, step, share=0.02, of_rows=True)]
    (terms,) = exact.replace(value=magnitude(exact.inputs["value"])).call(reference)
    a = sample.exact_arguments()
    layout = "BNSD" if a.layout == "BNSD_BSND" else a.layout
    query = to_heads(a.query, a.num_heads, layout)
    key = to_heads(a.key, a.num_key_value_heads or a.num_heads, layout)
    largest = largest_score(query, key, a.scale_value)
    return [within("out", out, terms, dtype, largest)]


def limits_of_int8(sample: Sample) -> tuple[Tensor, Tensor]:
    """An int8 output of the ends of what the output may be before it is quantised."""
    options = sample.options
    scale, offset = options["quant_scale2"], options.get("quant_offset2")
    not_quantized = dict.fromkeys(options.keys() & {"quant_scale2", "quant_offset2"})
    sample = sample.replace(**not_quantized)
    (before,) = expected(sample)
    ones = torch.ones_like(sample.inputs["value"], dtype=torch.float64)
    (weights,) = sample.double().replace(value=ones).call(reference)
    layout = "BSND" if options["layout"] == "BNSD_BSND" else options["layout"]

    def at_once(heads: Tensor) -> Tensor:
        """Does the same as `quantized`, but adds the offset before rounding the product."""
        n, d = heads.shape[1], heads.shape[3]
        scales, offsets = (
            x.double().flatten().expand(n * d).view(n, 1, d)
            for x in (scale, torch.zeros(1) if offset is None else offset)
        )
        return saturated((heads.half() * scales + offsets).float()).to(torch.int8)

    ends = []
    for end in (before.exact - before.allowed, before.exact + before.allowed):
        heads = to_heads(end, sample.exact_arguments().num_heads, layout)
        for int8 in (quantized(heads, scale, offset), at_once(heads)):
            # Rows without keys are 0, whatever the offset is.
            ends.append(from_heads(int8, layout).masked_fill(weights == 0, 0))
    # A scale may be negative.
    both = torch.stack(ends)
    return both.amin(0), both.amax(0)
