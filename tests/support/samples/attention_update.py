"""Samples of attention_update."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from ascend_attn_ops import reference
from torch import Tensor

from support.bounds import OF_TERMS, Expected, within

from .randomness import Random
from .record import Gradient, Operator, Outputs
from .sample import Sample
from .wrong_call import WrongCall, elsewhere, longer, put


@dataclass(frozen=True)
class UpdateCase:
    parts: int = 3
    rows: tuple[int, ...] = (2, 5)  # all axes but the last
    d: int = 24
    # Which lse are -inf: "rows", every third row in all parts; "parts", some in some.
    without_keys: str = ""
    offset: float = 0.0  # of every lse

    @property
    def id(self) -> str:
        parts = [f"n{self.parts}", "x".join(map(str, (*self.rows, self.d)))]
        parts += [f"no_keys_in_{self.without_keys}"] if self.without_keys else []
        parts += [f"offset{self.offset:g}"] if self.offset else []
        return "-".join(parts)

    def resized(self) -> UpdateCase:
        return replace(self, rows=(self.rows[0] + 3, *self.rows[1:]))


CASES = [
    UpdateCase(),
    UpdateCase(parts=1),
    UpdateCase(parts=2, rows=(7,), d=8),
    UpdateCase(parts=7, rows=(3, 2, 5), d=64),
    UpdateCase(parts=3, rows=(2, 3, 1, 4), d=1),
    UpdateCase(parts=2, rows=(), d=16),
    UpdateCase(parts=2, rows=(0,), d=8),
    UpdateCase(parts=3, rows=(2, 0, 3), d=40),
    UpdateCase(parts=3, rows=(4, 9), d=17, without_keys="rows"),
    UpdateCase(parts=1, rows=(9,), d=32, without_keys="rows"),
    UpdateCase(parts=5, rows=(33,), d=128, without_keys="parts"),
    UpdateCase(parts=2, rows=(600, 3), d=259),  # more than one thread, and one block of columns
    UpdateCase(parts=128, rows=(5,), d=8, without_keys="parts"),
    UpdateCase(parts=3, rows=(6,), d=512, offset=1e4),
    UpdateCase(parts=3, rows=(6,), d=31, offset=-1e4),
]


def build(case: UpdateCase, dtype: torch.dtype) -> Sample:
    random = Random(case.id, dtype)
    statistics = Random(f"{case.id}-lse", torch.float64 if dtype == torch.float64 else torch.float)
    lse = [3 * statistics.normal(*case.rows) + case.offset for _ in range(case.parts)]
    local_out = [random.normal(*case.rows, case.d) for _ in lse]
    for part, (x, y) in enumerate(zip(lse, local_out, strict=True)):
        if case.without_keys == "rows":
            x.view(-1)[::3] = -torch.inf
            y.view(-1, case.d)[::3] = torch.inf  # of which no product with zero is zero
        elif case.without_keys == "parts":
            x.view(-1)[part % 3 :: 3] = -torch.inf
    inputs = {"lse": lse, "local_out": local_out}
    return Sample(ATTENTION_UPDATE.name, f"{case.id}-{dtype}", inputs, {})


def backward(
    sample: Sample, outputs: Outputs, d_out: Tensor, d_lse_out: Tensor
) -> list[tuple[Tensor, ...]]:
    stacked = torch.ops.ascend._attention_update_grad(d_out, d_lse_out, *sample.args)
    return [x.unbind() for x in stacked]


def expected(sample: Sample) -> list[Expected]:
    exact, dtype = sample.double(), sample.inputs["local_out"][0].dtype
    out, lse_out = exact.call(reference)
    parts = [x.abs() for x in exact.inputs["local_out"]]
    terms, _ = exact.replace(local_out=parts).call(reference)
    # A sum of logarithms: what it is the logarithm of is accurate to 1e-5, and so is the maximum.
    of_lse = OF_TERMS[torch.float64 if dtype == torch.float64 else torch.float32]
    return [
        within("out", out, terms, dtype),
        Expected("lse_out", lse_out, of_lse * lse_out.abs().clamp(min=1)),
    ]


def torch_npu(x: dict[str, Any]) -> None:
    """It takes rows."""
    torch.ops.npu.npu_attention_update(
        [lse.flatten() for lse in x["lse"]],
        [part.reshape(x["lse"][0].numel(), part.shape[-1]) for part in x["local_out"]],
        1,
    )


ATTENTION_UPDATE = Operator(
    "attention_update",
    CASES,
    build,
    Gradient(("lse", "local_out"), ("out", "lse_out"), backward),
    expected=expected,
    # Not 128 parts: torch_npu has no room for them in the key under which CANN keeps executors.
    on_device=lambda case: case.d % 8 == 0 and case.parts < 128,
    torch_npu=torch_npu,
    torch_npu_takes=lambda case: case.d % 8 == 0,
    keeps_executors=True,
)

OPERATORS = [ATTENTION_UPDATE]


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
