"""How close two results must be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from ascend_attn_ops.reference.bounds.expected import cosine_difference
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    rtol: float
    # Relative to the largest element, which counts as at least one: the samples have unit scale,
    # and a gradient that cancels to zero keeps the rounding of terms of that size.
    of_largest: float = 0.0

    def allowed(self, expected: Tensor) -> Tensor:
        finite = expected[expected.isfinite()].abs()
        largest = float(finite.max()) if finite.numel() else 0.0
        return self.of_largest * max(1.0, largest) + self.rtol * expected.abs()


# For results without a bound in the operator's record. Half types have none that is relative to a
# result: see bounds.py.
TOLERANCES = {
    torch.float32: Tolerance(rtol=1e-5, of_largest=1e-5),
    torch.float64: Tolerance(rtol=1e-10, of_largest=1e-10),
}


def assert_close(
    name: str, actual: Tensor, expected: Tensor, tolerance: Tolerance, floor: Tensor | float = 0.0
) -> None:
    """Says where the results differ, by how much, and how alike they are on the whole.

    Sums that nearly cancel keep the rounding of their summands: `floor` is the bound on that, from
    bounds.py, and takes the place of a tolerance that is smaller.
    """
    assert actual.shape == expected.shape, f"{name}: {actual.shape} against {expected.shape}"
    x, y = actual.detach().double(), expected.detach().double()
    finite = y.isfinite()
    allowed = tolerance.allowed(y).clamp(min=torch.as_tensor(floor, dtype=torch.float64))
    inside = torch.where(finite, (x - y).abs() <= allowed, x == y)
    outside = int((~inside).sum())
    worst = torch.where(inside, 0, (x - y).abs()).nan_to_num(torch.inf, torch.inf)
    if outside == 0:
        return
    lines = [
        f"{name}: {outside} of {x.numel()} elements outside ({outside / x.numel():.2%}), "
        f"cosine difference {cosine_difference(x[finite], y[finite]):.3g}"
    ]
    for flat in worst.flatten().topk(min(5, outside)).indices:
        at = tuple(int(i) for i in torch.unravel_index(flat, x.shape))
        lines.append(f"  at {at}: got {float(x[at]):.9g}, expected {float(y[at]):.9g}")
    raise AssertionError("\n".join(lines))


def assert_same_bits(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Equal elements. A NaN equals nothing: no sample gives one, so that one would be noticed."""
    for index, (x, y) in enumerate(zip(actual, expected, strict=True)):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert torch.equal(x, y), f"output {index}: {int((x != y).sum())} elements differ"
