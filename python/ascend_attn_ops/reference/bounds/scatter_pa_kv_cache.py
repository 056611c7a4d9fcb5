"""Bounds on the caches of scatter_pa_kv_cache_: copies have the same bits, means are rounded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ascend_attn_ops import reference
from ascend_attn_ops.reference.bounds.expected import Expected
from ascend_attn_ops.reference.call import Sample, bytes_of

# How far a mean may be from exact, relative to max(1, |x|).
OF_MEANS = {torch.float16: 2**-8, torch.bfloat16: 2**-7}


@dataclass(frozen=True)
class Written(Expected):
    """A cache: what no mean is has the same bits, those of a NaN too."""

    def shares(self, actual: Tensor, other: Tensor | None = None) -> Tensor:
        y = self.exact if other is None else other
        differs = (bytes_of(actual) != bytes_of(y)).view(*y.shape, y.itemsize).any(-1)
        shares = (actual.double() - y.double()).abs() / self.allowed
        return torch.where(differs, shares, 0)


def expected(sample: Sample) -> list[Expected]:
    """From the arguments before the call."""
    after = sample.copied_to("cpu")
    after.call(reference)
    options = sample.options
    modes = options.get("scatter_mode"), options.get("compress_seq_offset") is not None
    means = modes[0] == "Rope" or (modes == ("None", True) and sample.inputs["key"].dim() == 4)
    bounds: list[Expected] = []
    for name in ("key_cache", "value_cache"):
        if (x := after.tensors.get(name)) is not None:
            share = OF_MEANS.get(x.dtype, 0.0) if means else 0.0
            bounds.append(Written(name, x, share * x.double().abs().clamp(min=1)))
    return bounds
