"""Calls that attention_update must refuse."""

from __future__ import annotations

from typing import Any

import torch
from ascend_attn_ops.check.samples.attention_update import ATTENTION_UPDATE, CASES, UpdateCase
from ascend_attn_ops.check.samples.sample import Sample
from torch import Tensor

from .wrong_call import WrongCall, elsewhere, longer, put


def wrong(id: str, change: Any, argument: str, expected: str = "", **options: Any) -> WrongCall:
    case = options.pop("case", CASES[0])
    return WrongCall(id, ATTENTION_UPDATE, case, change, argument, expected=expected, **options)


def without_axes(sample: Sample) -> Sample:
    part = sample.inputs["local_out"][0]
    return sample.replace(lse=[torch.ones(())], local_out=[part.new_ones(())])


WRONG_CALLS = [
    # Without a tensor nothing says that they are fake.
    wrong("no parts", {"lse": [], "local_out": []}, "lse", "got an empty list", on_meta=False),
    wrong("no lse", {"lse": []}, "lse", "expected at least one tensor, got an empty list"),
    wrong("fewer results", put("local_out", lambda x: x[:2]), "local_out",
          "expected 3 tensors, as many as lse has, got 2"),
    wrong("more results", put("local_out", lambda x: [*x, x[0]]), "local_out",
          "as many as lse has, got 4"),
    wrong("no axis", without_axes, r"local_out\[0\]", r"expected shape \(\.\.\., D\), got \[\]"),
    wrong("integers", put("local_out", lambda x: [y.int() for y in x]), r"local_out\[0\]",
          "expected dtype float16, .*, got int32", exception=TypeError),
    wrong("two dtypes", put("local_out[2]", Tensor.half), r"local_out\[2\]",
          r"expected dtype bfloat16 \(local_out\[0\]'s\), got float16", exception=TypeError),
    wrong("lse in half precision", put("lse[1]", Tensor.bfloat16), r"lse\[1\]",
          "expected dtype float32, got bfloat16", exception=TypeError),
    wrong("lse in float32 beside float64", put("lse[1]", Tensor.float), r"lse\[1\]",
          "expected dtype float64, got float32", exception=TypeError, dtype=torch.float64),
    wrong("lse in float64", put("lse[0]", Tensor.double), r"lse\[0\]",
          "expected dtype float32, got float64", exception=TypeError),
    wrong("other rows", put("local_out[2]", longer(0)), r"local_out\[2\]",
          r"expected shape \(\.\.\., D\) = \[2, 5, 24\], got \[3, 5, 24\]"),
    wrong("other head size", put("local_out[1]", longer(-1)), r"local_out\[1\]",
          r"= \[2, 5, 24\], got \[2, 5, 25\]"),
    wrong("another rank", put("local_out[1]", lambda x: x[0]), r"local_out\[1\]",
          r"= \[2, 5, 24\], got \[5, 24\]"),
    wrong("lse of other rows", put("lse[1]", longer(1)), r"lse\[1\]",
          r"expected shape \(\.\.\.\) = \[2, 5\], got \[2, 6\]"),
    wrong("lse with a last axis", put("lse[0]", lambda x: x[..., None]), r"lse\[0\]",
          r"= \[2, 5\], got \[2, 5, 1\]"),
    wrong("a part elsewhere", put("local_out[1]", elsewhere), r"local_out\[1\]", "expected device",
          on_meta=False),
    wrong("lse elsewhere", put("lse[2]", elsewhere), r"lse\[2\]", "expected device",
          on_meta=False),
    wrong("float64 on A2", None, "local_out", "float16 or bfloat16 or float32 on Ascend A2",
          exception=TypeError, dtype=torch.float64, limits="A2"),
    wrong("D of 17", None, "local_out", "D .* a multiple of 8 in 8..512 on Ascend A3, got 17",
          case=UpdateCase(d=17), limits="A3"),
    wrong("D of 520", None, "local_out", "a multiple of 8 in 8..512", case=UpdateCase(d=520),
          limits="950"),
    wrong("129 parts", None, "lse",
          r"n \(parts\) to be 1..128 on Ascend A2 with CANN 9.1, got 129",
          case=UpdateCase(parts=129), limits="A2"),
    wrong("17 parts on 950", None, "lse", r"n \(parts\) to be 1..16 on Ascend 950, got 17",
          case=UpdateCase(parts=17), limits="950"),
    wrong("on 310P", None, "product", "a product that has aclnnAttentionUpdate, got Ascend 310P",
          exception=NotImplementedError, limits="310P"),
]  # fmt: skip
