"""Properties of every valid call."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random

import ascend_attn_ops
import torch
from ascend_attn_ops.reference.bounds.expected import Expected
from ascend_attn_ops.reference.bounds.prompt_flash_attention import ExpectedOfInt8
from support.samples import OPERATORS, Sample, bytes_of
from torch import Tensor

from .case import Finding
from .copies import storage_bytes
from .memory import placed

Outputs = tuple[Tensor, ...]

_M_PERTURB = -6
_PERTURB_AT_START = int(os.environ.get("MALLOC_PERTURB_", "0"))
# Fills freed memory; its complement fills allocated memory. As floating point: almost nothing and
# huge, NaN, huge and almost nothing.
FILLS = (0x80, 0xFF, 0x02)
_mallopt: Callable[[int, int], int] = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
THREADS = (1, 2, 4)
# Few cases, because changing the thread count takes longer than a small call.
SHARE_OF_THREADS = 0.2


@contextmanager
def poisoned_memory(fill: int) -> Iterator[None]:
    """Where the C library is glibc. torch's own filling of new tensors would change how operators
    run, being part of its deterministic mode, and never fills what kernels allocate for themselves.
    """
    _mallopt(_M_PERTURB, fill)
    try:
        yield
    finally:
        _mallopt(_M_PERTURB, _PERTURB_AT_START)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Run:
    sample: Sample
    threads: int
    fill: int
    public: bool  # through the public function, or through torch.ops

    def __str__(self) -> str:
        how = "ascend_attn_ops" if self.public else "torch.ops"
        return f"{how}, {self.threads} threads, memory freed as {self.fill:#x}"

    def outputs(self) -> Outputs:
        before = {name: content(x) for name, x in self.sample.tensors.items()}
        with threads(self.threads), poisoned_memory(self.fill):
            outputs = self.sample.call(ascend_attn_ops if self.public else torch.ops.ascend)
        for name, x in self.sample.tensors.items():
            if not torch.equal(content(x), before[name]):
                raise Finding(f"{name}: the call wrote to it, or beside it ({self})")
        return outputs


def content(x: Tensor) -> Tensor:
    """Returns a copy of a tensor's whole storage, or the sum of a large one."""
    every = storage_bytes(x)
    if every.numel() < 2**20:
        return every.clone()
    return every[: every.numel() // 8 * 8].view(torch.int64).sum()


def with_other_lengths(sample: Sample, random: Random) -> Sample:
    """The public functions take lengths as a tensor or as a list, whatever the operator wants."""
    changes = {}
    for name, x in sample.arguments.items():
        if name.startswith("actual_seq_lengths_") and x is not None and random.random() < 0.5:
            integer = random.choice((torch.int32, torch.int64))
            changes[name] = x.tolist() if isinstance(x, Tensor) else torch.tensor(x, dtype=integer)
    return sample.replace(**changes)


def run(sample: Sample, random: Random, same_on_all_threads: bool) -> Outputs:
    """Returns the outputs, after checking that nothing else changes their bits.

    Neither other strides, a second run nor other uninitialised memory may change them, nor, where
    that is promised, another thread count. A call changes no argument.
    """
    counts = [random.choice(THREADS)] * 3
    if same_on_all_threads and random.random() < SHARE_OF_THREADS:
        counts = random.sample(THREADS, 3)
    other = placed(sample, random)
    fills = random.sample(FILLS, 3)
    runs = [
        Run(sample, counts[0], fills[0], public=False),
        # Operators that autograd alone calls have no public function.
        Run(with_other_lengths(other, random), counts[1], fills[1], public=True)
        if hasattr(ascend_attn_ops, sample.operator)
        else Run(other, counts[1], fills[1], public=False),
        Run(other, counts[2], fills[2], public=False),
    ]
    first = runs[0].outputs()
    for again in runs[1:]:
        for number, (x, y) in enumerate(zip(again.outputs(), first, strict=True)):
            if x.dtype != y.dtype or x.shape != y.shape:
                raise Finding(f"output {number}: {x.dtype} {x.shape} against {y.dtype} {y.shape}")
            if not x.is_contiguous():
                raise Finding(f"output {number} is not contiguous ({again})")
            if not torch.equal(bytes_of(x), bytes_of(y)):
                strides = {name: t.stride() for name, t in other.tensors.items()}
                raise Finding(
                    f"output {number}: {int((x != y).sum())} elements differ between {runs[0]} "
                    f"and {again} with strides {strides}"
                )
    return first


def check(sample: Sample, actual: Outputs, expected: Sequence[Expected] | None = None) -> None:
    """Compares the outputs with `expected`, or with those of the operator's record."""
    try:
        if expected is None:
            operator = OPERATORS[sample.operator]
            if operator.bounds.expected is None:
                operator.bounds.check(sample, actual)
                return
            expected = operator.bounds.expected(sample)
        for one, x in zip(expected, actual, strict=True):
            # Some of many small samples exceed a share by chance.
            few = isinstance(one, ExpectedOfInt8)
            (replace(one, deviations=3.0) if few else one).check(x)
    except AssertionError as error:
        raise Finding(f"{sample.operator} {sample.id}\n{error}") from None
