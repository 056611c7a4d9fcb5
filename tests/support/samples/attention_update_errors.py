"""Calls that attention_update must refuse."""

from __future__ import annotations

from functools import partial

import torch
from ascend_attn_check.samples.attention_update import ATTENTION_UPDATE, CASES, UpdateCase
from ascend_attn_ops.reference.call import Sample
from torch import Tensor

from .wrong_call import elsewhere, flatter, longer, wrong_call

FIRST = CASES[0]

wrong = partial(wrong_call, ATTENTION_UPDATE)
wrong_type = partial(wrong, exception=TypeError)


def without_axes(sample: Sample) -> Sample:
    part = sample.inputs["local_out"][0]
    return sample.replace(lse=[torch.ones(())], local_out=[part.new_ones(())])


WRONG_CALLS = [
    # Without a tensor nothing says that they are fake.
    wrong(FIRST, "lse: got an empty list", lse=[], local_out=[], on_meta=False),
    wrong(FIRST, "expected at least one tensor, got an empty list", lse=[]),
    wrong(FIRST, "expected 3 tensors, as many as lse has, got 2", local_out=lambda x: x[:2]),
    wrong(FIRST, "as many as lse has, got 4", local_out=lambda x: [*x, x[0]]),
    wrong(FIRST, r"local_out\[0\]: expected shape \(\.\.\., D\), got \[\]", change=without_axes),
    wrong_type(FIRST, r"local_out\[0\]: expected dtype float16, .*, got int32",
               local_out=lambda x: [y.int() for y in x]),
    wrong_type(FIRST, r"expected dtype bfloat16 \(local_out\[0\]'s\), got float16",
               **{"local_out[2]": Tensor.half}),
    wrong_type(FIRST, "expected dtype float32, got bfloat16", **{"lse[1]": Tensor.bfloat16}),
    wrong_type(FIRST, "expected dtype float64, got float32", dtype=torch.float64,
               **{"lse[1]": Tensor.float}),
    wrong_type(FIRST, "expected dtype float32, got float64", **{"lse[0]": Tensor.double}),
    wrong(FIRST, r"expected shape \(\.\.\., D\) = \[2, 5, 24\], got \[3, 5, 24\]",
          **{"local_out[2]": longer(0)}),
    wrong(FIRST, r"= \[2, 5, 24\], got \[2, 5, 25\]", **{"local_out[1]": longer(-1)}),
    wrong(FIRST, r"= \[2, 5, 24\], got \[5, 24\]", **{"local_out[1]": flatter}),
    wrong(FIRST, r"expected shape \(\.\.\.\) = \[2, 5\], got \[2, 6\]", **{"lse[1]": longer(1)}),
    wrong(FIRST, r"= \[2, 5\], got \[2, 5, 1\]", **{"lse[0]": lambda x: x[..., None]}),
    wrong(FIRST, "expected device", **{"local_out[1]": elsewhere}),
    wrong(FIRST, "expected device", **{"lse[2]": elsewhere}),
    wrong_type(FIRST, "local_out: float16 or bfloat16 or float32", limits="A2",
               dtype=torch.float64),
    wrong(UpdateCase(d=17), r"local_out: D .* a multiple of 8 in 8\.\.512 .* 17", limits="A3"),
    wrong(UpdateCase(d=520), r"local_out: a multiple of 8 in 8\.\.512", limits="950"),
    wrong(UpdateCase(parts=129), r"lse: n \(parts\) to be 1\.\.128 on .* with CANN 9\.1, got 129",
          limits="A2"),
    wrong(UpdateCase(parts=17), r"lse: n \(parts\) to be 1\.\.16 on .*, got 17", limits="950"),
    wrong(FIRST, "product: a product that has aclnnAttentionUpdate", NotImplementedError,
          limits="310P"),
]  # fmt: skip
