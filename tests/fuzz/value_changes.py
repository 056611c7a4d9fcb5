"""Changes of arguments that are no tensors, or are left out."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .copies import Once
from .tensor_changes import WHOLE, changed

Random = random.Random

LAYOUTS = (
    "BSND", "BNSD", "BSH", "SBH", "TND", "BNSD_BSND", "Norm", "PA_NZ", "None", "Rope", "Omni",
)  # fmt: skip
APPENDED = (" ", "\n", "\0", "é", "\ud800", "\x1b[0m", "%s", "{}", "\r", "\u2028")
# Values of any type but a list's; reading one does not change it.
ANYTHING: tuple[Callable[[], object], ...] = (
    *(lambda x=x: x for x in WHOLE),
    *(lambda x=x: x for x in (2**63, -(2**63) - 1, 10**30, 10**400)),
    *(lambda x=x: x for x in (0.0, -0.0, 0.5, -1.5, 3.0, 1e-300, 1e30, 1e308)),
    *(lambda x=x: x for x in (float("nan"), float("inf"), -float("inf"), 1j)),
    *(lambda x=x: x for x in (None, True, False, "", "text", b"BSND", (), ..., object, torch.int8)),
    *(lambda x=x: x for x in (np.int64(3), np.float32(1), np.bool_(True), np.uint64(2**63))),
    lambda: np.arange(3), lambda: torch.tensor(3), lambda: torch.tensor(0.5),
    lambda: torch.tensor([2]), lambda: torch.tensor([1, 2]), lambda: torch.tensor(1j),
    lambda: torch.tensor(1, device="meta"), lambda: torch.empty(0), lambda: torch.zeros(2, 3), list,
    dict, lambda: [1], lambda: ["a"], lambda: [None], lambda: {"a": 1}, lambda: {1, 2},
    lambda: range(3),
)  # fmt: skip


def _number(r: Random, x: Any) -> object:
    """Returns a number near x, or x in another type."""
    changes: list[Callable[[], object]] = [
        lambda: x + 1, lambda: x - 1, lambda: -x, lambda: 2 * x, lambda: float(x),
        lambda: np.float64(x), lambda: torch.tensor(x), lambda: torch.tensor([x]), lambda: str(x),
        lambda: [x], lambda: complex(x), lambda: np.int64(x), lambda: int(x), lambda: bool(x),
    ]  # fmt: skip
    try:
        return r.choice(changes)()
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _text(r: Random, x: str) -> object:
    changes: list[Callable[[], object]] = [
        x.lower, x.swapcase, lambda: x[:-1], lambda: x + x[-1:], lambda: x + r.choice(APPENDED),
        lambda: "a\n" * 5_000, lambda: x.encode(errors="surrogatepass"), lambda: [x],
        lambda: np.str_(x), lambda: np.array(x),
    ]  # fmt: skip
    return r.choice(changes)() if r.randrange(2) else r.choice(LAYOUTS)


def _lengths(r: Random, x: Sequence[Any]) -> object:
    """Changes a list of whole numbers."""
    at = r.randrange(len(x)) if x else 0

    def put(value: object) -> list[object]:
        return [*x[:at], value, *x[at + 1 :]]

    changes: list[Callable[[], object]] = [
        lambda: x[:-1], lambda: [*x, x[-1] if x else 0], lambda: [*x, 0], lambda: x[::-1], list,
        lambda: put(x[at] + 1 if x else 0), lambda: put(x[at] - 1 if x else 0),
        lambda: put(r.choice(WHOLE)), lambda: put(r.choice(ANYTHING)()), lambda: put([1]),
        lambda: tuple(x), lambda: np.array(x), lambda: np.array(x, dtype=np.float32),
        lambda: torch.tensor(x), lambda: torch.tensor(x, dtype=torch.int32),
        lambda: torch.tensor(x, dtype=torch.float32), lambda: torch.tensor(x).to("meta"),
        lambda: torch.tensor([x]), lambda: Once(x), lambda: set(x), lambda: dict.fromkeys(x),
        lambda: str(x), lambda: [*x] * 50, lambda: x[0] if x else None,
        lambda: [np.int64(n) for n in x], lambda: [torch.tensor(n) for n in x],
        lambda: [float(n) for n in x],
    ]  # fmt: skip
    try:
        return r.choice(changes)()
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # They are no numbers any more, by another change.
        return None


def _tensors(r: Random, x: Sequence[Tensor]) -> object:
    at = r.randrange(len(x))
    choice = r.randrange(10)
    if choice < 5:
        return [*x[:at], changed(r, x[at])[1], *x[at + 1 :]]
    changes: list[Callable[[], object]] = [
        lambda: x[:-1], lambda: [*x, x[at]], list,
        lambda: [*x[:at], r.choice(ANYTHING)(), *x[at + 1 :]], lambda: tuple(x), lambda: [list(x)],
        lambda: dict(enumerate(x)), lambda: Once(x), lambda: x[at], lambda: [x[at]] * len(x),
        lambda: [x[at]] * 200,
    ]  # fmt: skip
    return r.choice(changes)()


def changed_value(r: Random, x: object) -> tuple[str, object]:
    """The kind of the change, and another value."""
    if isinstance(x, Tensor) and r.randrange(8):
        return changed(r, x)
    if r.randrange(3):
        if isinstance(x, str):
            return "text", _text(r, x)
        if isinstance(x, (int, float)):
            return "number", _number(r, x)
        if isinstance(x, (list, tuple)) and x and all(isinstance(y, Tensor) for y in x):
            return "tensors", _tensors(r, x)
        if isinstance(x, (list, tuple)):
            return "lengths", _lengths(r, x)
    return "anything", r.choice(ANYTHING)()
