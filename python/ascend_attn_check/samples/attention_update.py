"""Samples of attention_update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from ascend_attn_ops.reference.call import Outputs, Sample
from torch import Tensor

from .randomness import Random
from .record import Gradient, Operator
from .torch_npu_calls import torch_npu


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


def in_rows(x: dict[str, Any]) -> Any:
    """torch_npu takes rows."""
    lse = [one.flatten() for one in x["lse"]]
    parts = [part.reshape(lse[0].numel(), part.shape[-1]) for part in x["local_out"]]
    return torch_npu("npu_attention_update", x, lse=lse, local_out=parts, update_type=1)


ATTENTION_UPDATE = Operator(
    "attention_update",
    CASES,
    build,
    Gradient(("lse", "local_out"), ("out", "lse_out"), backward),
    # Not 128 parts: torch_npu has no room for them in the key under which CANN keeps executors.
    on_device=lambda case: case.d % 8 == 0 and case.parts < 128,
    torch_npu=in_rows,
)

OPERATORS = [ATTENTION_UPDATE]
