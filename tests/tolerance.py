"""How close a result must be to the fp64 reference: docs/specification/tolerances.md."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    rtol: float
    atol: float = 0.0
    of_largest: float = 0.0
    # The largest element counts as at least one: the samples have unit scale, and a gradient that
    # cancels to zero keeps the rounding of terms of that size.
    unit_scale: bool = True
    share_outside: float = 0.0
    # What none of those outside may differ by: never by infinity, nor may they be NaN.
    farthest: float = torch.finfo(torch.float64).max

    def allowed(self, expected: Tensor) -> Tensor:
        finite = expected[expected.isfinite()].abs()
        largest = float(finite.max()) if finite.numel() else 0.0
        scale = max(1.0, largest) if self.unit_scale else largest
        return self.atol + self.of_largest * scale + self.rtol * expected.abs()


TOLERANCES = {
    torch.float16: Tolerance(rtol=5e-3, atol=2.5e-5, share_outside=0.005),
    torch.bfloat16: Tolerance(rtol=2**-7, atol=1e-4, share_outside=0.005),
    torch.float32: Tolerance(rtol=1e-5, of_largest=1e-5),
    torch.float64: Tolerance(rtol=1e-10, of_largest=1e-10),
    # Of an int8 output: docs/specification/prompt_flash_attention.md.
    torch.int8: Tolerance(rtol=0, share_outside=0.03, farthest=1),
}

# Beside infinities, where no element is the largest: absolute, of samples of unit scale.
CLOSE = {torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}


def assert_close(name: str, actual: Tensor, expected: Tensor, tolerance: Tolerance) -> None:
    """Says where the results differ, by how much, and how alike they are on the whole."""
    assert actual.shape == expected.shape, f"{name}: {actual.shape} against {expected.shape}"
    x, y = actual.detach().double(), expected.detach().double()
    finite = y.isfinite()
    inside = torch.where(finite, (x - y).abs() <= tolerance.allowed(y), x == y)
    outside = int((~inside).sum())
    worst = torch.where(inside, 0, (x - y).abs()).nan_to_num(torch.inf, torch.inf)
    if outside == 0 or (
        outside <= tolerance.share_outside * x.numel() and worst.max() <= tolerance.farthest
    ):
        return
    lines = [
        f"{name}: {outside} of {x.numel()} elements outside ({outside / x.numel():.2%}), "
        f"cosine difference {cosine_difference(x[finite], y[finite]):.3g}"
    ]
    for flat in worst.flatten().topk(min(5, outside)).indices:
        at = tuple(int(i) for i in torch.unravel_index(flat, x.shape))
        lines.append(f"  at {at}: got {float(x[at]):.9g}, expected {float(y[at]):.9g}")
    raise AssertionError("\n".join(lines))


def cosine_difference(x: Tensor, y: Tensor) -> float:
    denominator = float((x * x + y * y).sum())
    return 0.0 if denominator == 0 else 1 - 2 * float((x * y).sum()) / denominator


def assert_same_bits(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Equal elements. A NaN equals nothing: no sample gives one, so that one would be noticed."""
    for index, (x, y) in enumerate(zip(actual, expected, strict=True)):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert torch.equal(x, y), f"output {index}: {int((x != y).sum())} elements differ"
