"""Random sizes and values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import make_dataclass
from random import Random
from typing import Any

import torch
from support.samples import Sample
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SPECIAL = (torch.nan, torch.inf, -torch.inf)


def seeded(case: type[Any]) -> Any:
    """Returns the type of a case that has other numbers for every seed."""

    def id(self: Any) -> str:
        return f"{case.id.fget(self)}-{self.seed}"

    return make_dataclass(
        f"Fuzzed{case.__name__}", [("seed", int, 0)], bases=(case,), frozen=True,
        namespace={"id": property(id)},
    )  # fmt: skip


def size(random: Random, largest: int = 140) -> int:
    """Mostly a few; sometimes none, one, or about a power of two."""
    kind = random.random()
    if kind < 0.03:
        return 0
    if kind < 0.15:
        return 1
    if kind < 0.85:
        return random.randint(2, min(12, largest))
    near = [x + d for x in (16, 32, 64, 128) for d in (-1, 0, 1, 5) if x + d <= largest]
    return random.choice(near or [largest])


def head_size(random: Random, largest: int = 140) -> int:
    return max(1, size(random, largest))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def label(case: Any, dtype: torch.dtype) -> str:
    """Names a case in the counts of a campaign."""
    mode = "no mask" if case.mode is None else f"mode {case.mode}"
    kinds = (getattr(case, name, "") for name in ("pages", "kind"))
    return " ".join((case.layout, *filter(None, kinds), mode, name_of(dtype)))


def lengths(random: Random, count: int, largest: int) -> tuple[int, ...]:
    """Draws lengths of sequences, some of them empty."""
    return tuple(0 if random.random() < 0.2 else size(random, largest) for _ in range(count))


def scaled(
    sample: Sample, names: Iterable[str], random: Random, exponents: tuple[int, int] = (-10, 6)
) -> Sample:
    """Multiplies some of the tensors by a power of two, which changes no digit."""
    present = [name for name in names if name in sample.tensors]
    changed = random.sample(present, random.randint(0, len(present)))

    factors = {id(sample.tensors[name]): 2.0 ** random.randint(*exponents) for name in changed}
    return sample.map(lambda x: x * factors[id(x)] if id(x) in factors else x)


def with_zeros(sample: Sample, names: Iterable[str], random: Random) -> Sample:
    """Small integers: sums are exact, many scores are equal, and many are zero."""
    wanted = {id(sample.tensors[name]) for name in names if name in sample.tensors}
    return sample.map(lambda x: (2 * x).round().clamp(-2, 2) if id(x) in wanted else x)


def with_special(sample: Sample, names: Sequence[str], random: Random) -> tuple[Sample, str]:
    """NaN or an infinity in a few elements of one tensor, and which tensor that is."""
    present = [name for name in names if name in sample.tensors and sample.tensors[name].numel()]
    if not present:
        return sample, ""
    name = random.choice(present)
    chosen = sample.tensors[name]
    value = random.choice(SPECIAL)
    places = [random.randrange(chosen.numel()) for _ in range(random.randint(1, 3))]

    def change(x: Tensor) -> Tensor:
        if x is not chosen:
            return x
        x = x.clone()
        x.view(-1)[places] = value
        return x

    return sample.map(change), name


def with_float32_weights(sample: Sample, random: Random) -> Sample:
    """Sometimes converts the indexer's weights to float32, which it takes with half types."""
    weights = sample.tensors["weights"]
    if weights.dtype.itemsize > 2 or random.random() < 0.7:
        return sample
    return sample.replace(weights=weights.float())


def scale_value(random: Random, usual: float) -> float:
    """Mostly the usual one; without any score, of the other sign, so large that one key has all the
    weight, so small that all keys have the same."""
    if random.random() < 0.7:
        return usual
    return random.choice((0.0, -usual, 1.0, -1.0, 20 * usual, -20 * usual, 1e-6, 1e-30))
