"""The bound of docs/numerics.md: c * A and half a unit in the last place, for every
element, where A is the same formula with absolute values. The modules beside this one compute it
for their operators, by the reference.

Scores are float32 whatever they are of, and a weight is as uncertain as its score. The bound on
softmax_max says by how much a score may be off: 2e-6 of the largest. With large scores that is more
than the bound on a sum of float32, and takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

OF_TERMS = {
    torch.bfloat16: 2**-7,
    torch.float16: 2**-9,
    torch.float32: 1e-5,
    torch.float64: 1e-10,
}
OF_SCORES = {torch.float64: 2e-14}
OF_SCORES_IN_FLOAT32 = 2e-6
# Below this share of the sum of its terms' sizes, a score has the sign of its rounding. Scores are
# float32, except those of float64 inputs.
UNDECIDED = {dtype: 1e-14 if dtype == torch.float64 else 2e-6 for dtype in OF_TERMS}
# Weights that are almost nothing are zero in float32, and their products with anything.
VANISHING = 1e-30


@dataclass(frozen=True)
class Expected:
    """An output: what is exact, and how far from it each element may be."""

    name: str
    exact: Tensor
    allowed: Tensor
    # Whether it is rounded to the dtype of the output, by half a unit more than `allowed`.
    rounded: bool = field(default=True, kw_only=True)

    def shares(self, actual: Tensor, other: Tensor | None = None) -> Tensor:
        """How far each element is from exact, or from that of another output, as a share of what is
        allowed: at most 1, if it is right."""
        x = actual.detach().double()
        y = self.exact.double()
        allowed = self.allowed + half_ulp(y, actual.dtype) if self.rounded else self.allowed
        y = y if other is None else other.double()
        same = (x == y) | (x.isnan() & y.isnan())
        if actual.is_floating_point():
            # Numbers beyond the dtype's range become infinite.
            beyond = y.abs() > torch.finfo(actual.dtype).max
            same |= x == torch.where(beyond, y.sign() * torch.inf, y)
        return torch.where(same, 0, (x - y).abs() / allowed)

    def check(self, actual: Tensor) -> None:
        assert actual.shape == self.exact.shape, (
            f"{self.name}: {list(actual.shape)} against {list(self.exact.shape)}"
        )
        inside = self.shares(actual) <= 1
        if bool(inside.all()):
            return
        x, y = actual.detach().double(), self.exact.double()
        outside = int((~inside).sum())
        finite = x.isfinite() & y.isfinite()
        worst = torch.where(inside, 0, (x - y).abs()).nan_to_num(torch.inf, torch.inf)
        lines = [
            f"{self.name}: {outside} of {x.numel()} elements outside, "
            f"cosine difference {cosine_difference(x[finite], y[finite]):.3g}"
        ]
        for flat in worst.flatten().topk(min(5, outside)).indices:
            at = tuple(int(i) for i in torch.unravel_index(flat, x.shape))
            allowed = float(self.allowed.expand(x.shape)[at])
            lines.append(
                f"  at {at}: got {float(x[at]):.9g}, expected {float(y[at]):.9g} +- {allowed:.3g}"
            )
        raise AssertionError("\n".join(lines))

    def largest_error(self, actual: Tensor) -> float:
        """Returns the largest error of an accepted output, as a share of the allowed one."""
        return float(self.shares(actual).max()) if actual.numel() else 0.0


def relative_difference(x: Tensor, y: Tensor) -> float:
    """Returns the difference relative to the maximum; equal infinities do not differ."""
    assert x.shape == y.shape
    if not x.numel():
        return 0.0
    x, y = x.double(), y.double()
    difference = torch.where(x == y, 0, (x - y).abs())
    largest = y[y.isfinite()].abs().max() if y.isfinite().any() else torch.ones(())
    return float(difference.max() / largest.clamp(min=1e-30))


def cosine_difference(x: Tensor, y: Tensor) -> float:
    denominator = float((x * x + y * y).sum())
    return 0.0 if denominator == 0 else 1 - 2 * float((x * y).sum()) / denominator


def magnitude(x: Tensor) -> Tensor:
    """|x|, 0 where it is not finite: what is finite beside that is as exact as ever."""
    return torch.where(x.isfinite(), x.abs(), 0)


def half_ulp(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns half a unit in the last place of the dtype, at |exact|."""
    digits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}[dtype]
    smallest = torch.finfo(dtype).smallest_normal
    exponent = exact.abs().nan_to_num(0, 0).clamp(min=smallest).frexp().exponent
    return torch.ldexp(torch.ones_like(exact), exponent - digits - 1)


def within(
    name: str, exact: Tensor, terms: Tensor, dtype: torch.dtype, largest_score: float = 0.0
) -> Expected:
    """`terms` is A, `dtype` that of the inputs."""
    of_scores = OF_SCORES.get(dtype, OF_SCORES_IN_FLOAT32)
    # The score and the maximum that is subtracted from it.
    relative = max(OF_TERMS[dtype], 2 * of_scores * largest_score)
    return Expected(name, exact, relative * terms + VANISHING)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and sums beside inputs of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def of_lse(lse: Tensor, dtype: torch.dtype, largest_score: float) -> Expected:
    """A score, and what a sum is the logarithm of."""
    bound = within("softmax_lse", lse, torch.ones_like(lse), wide(dtype), largest_score)
    return replace(bound, allowed=bound.allowed + OF_TERMS[wide(dtype)] * magnitude(lse))


def of_statistics(
    softmax_max: Tensor, softmax_sum: Tensor, dtype: torch.dtype, largest_score: float
) -> list[Expected]:
    of_scores = OF_SCORES.get(dtype, OF_SCORES_IN_FLOAT32)
    of_sum = max(1e-10 if dtype == torch.float64 else 1e-5, 2 * of_scores * largest_score)
    absolute = torch.full_like(softmax_max, of_scores * max(1.0, largest_score))
    return [
        Expected("softmax_max", softmax_max, absolute),
        Expected("softmax_sum", softmax_sum, of_sum * softmax_sum.abs()),
    ]


def largest_score(query: Tensor, key: Tensor, scale: float) -> float:
    """At least the largest sum of the absolute values of what a score is a sum of."""
    if query.numel() == 0 or key.numel() == 0:
        return 0.0
    of_query, of_key = (magnitude(x).norm(dim=-1).max() for x in (query, key))
    return abs(scale) * float(of_query * of_key)


def counted_signs(scores: Tensor, terms: Tensor, dtype: torch.dtype) -> Tensor:
    """How often a term counts in A that has the derivative of relu(scores) as a factor.

    That is 0 or 1, where rounding does not decide which: there a term may be missing, or one too
    many, and counts as often as the bound on it, c * A, is one whole term.
    """
    # Processors may take the smallest numbers for 0.
    rounding = UNDECIDED[dtype] * terms + VANISHING
    undecided = (scores != 0) & (scores.abs() < rounding)
    return torch.where(undecided, 1 / OF_TERMS[dtype], (scores > 0).double())
