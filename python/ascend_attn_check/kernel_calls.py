"""Calls that CANN's own kernels have computed: their arguments and their results.

A file is a list of {operator, what, arguments, outputs}, written by torch.save and possibly
compressed by xz. The kernels' sources were compiled for x86 and executed on an emulated AI core:
docs/numerics.md. Nothing in a file is executed.
"""

from __future__ import annotations

import io
import lzma
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from ascend_attn_ops.reference.bounds import BOUNDS
from ascend_attn_ops.reference.bounds.expected import Expected, relative_difference
from ascend_attn_ops.reference.bounds.lightning_indexer import all_scores
from ascend_attn_ops.reference.call import Sample, bytes_of, sample_of
from torch import Tensor

PATTERNS = ("*.pt", "*.pt.xz")
PRODUCTS = ("A2", "A3")  # which have the same kernels
_MOST_BYTES = 2**30  # of a file, once it is decompressed
_OF_STATISTICS = 1e-5  # of their maximum; the KL loss and gradients in float32 as well


@dataclass(frozen=True)
class Distance:
    """How far an output of two results of a call is apart."""

    output: str
    difference: float  # the largest, relative to the maximum
    share: float  # of the allowed difference; more than 1 and NaN are too far

    @property
    def allowed(self) -> bool:
        return self.share <= 1


@dataclass(frozen=True, eq=False)
class KernelCall:
    sample: Sample
    outputs: dict[str, Tensor]

    @property
    def id(self) -> str:
        return f"{self.sample.operator}-{self.sample.id}".replace(" ", "_")

    def run(self, device: str) -> dict[str, Tensor]:
        """Return what the operator computes there, by the names of the recorded outputs."""
        sample = self.sample.clone().to(device)
        named = BOUNDS[sample.operator].results(sample, sample.call(torch.ops.ascend))
        return {name: named[name].cpu() for name in self.outputs}

    def distances(
        self, results: Mapping[str, Tensor], others: Mapping[str, Tensor]
    ) -> list[Distance]:
        """Compare two results of the call.

        Copies are equal. Selections are equal up to exact ties, their values to one ulp, and
        float32 outputs to 1e-5 of the maximum. Other elements are as close to each other as the
        tolerances want them to be to the exact result.
        """
        return [self._distance(name, results[name], others[name]) for name in self.outputs]

    def _distance(self, name: str, x: Tensor, y: Tensor) -> Distance:
        if x.shape != y.shape or x.dtype != y.dtype:
            return Distance(name, torch.inf, torch.inf)
        if BOUNDS[self.sample.operator].in_place:
            if torch.equal(bytes_of(x), bytes_of(y)):
                return Distance(name, 0.0, 0.0)
            return Distance(name, relative_difference(x, y), torch.inf)
        if name == "sparse_indices":
            # Exact ties may be exchanged: equal scores in equal slots.
            x, y, allowed = self._scores_of(x), self._scores_of(y), 0.0
        elif name == "sparse_values":
            allowed = torch.finfo(y.dtype).eps
        elif y.dtype == torch.float32:
            allowed = _OF_STATISTICS
        else:
            shares = self._bounds[name].shares(x, y)
            share = float(shares.max()) if shares.numel() else 0.0
            return Distance(name, relative_difference(x, y), share)
        difference = relative_difference(x, y)
        share = difference / allowed if allowed else difference and torch.inf
        return Distance(name, difference, share)

    @cached_property
    def _bounds(self) -> dict[str, Expected]:
        bounds = BOUNDS[self.sample.operator]
        assert bounds.expected is not None, f"{bounds.operator} has no bounds of its elements"
        return dict(zip(bounds.output_names, bounds.expected(self.sample), strict=True))

    def _scores_of(self, sparse_indices: Tensor) -> Tensor:
        """The exact scores of the selected keys, in descending order."""
        keys = self._scores.shape[-1]
        # Padding has the score -inf. An index beyond the keys has NaN, which equals nothing.
        ends = torch.tensor([-torch.inf, torch.nan], dtype=self._scores.dtype)
        chosen = torch.cat((self._scores, ends.expand(*self._scores.shape[:-1], 2)), -1)
        of_keys = torch.where(sparse_indices < keys, sparse_indices, keys + 1)
        columns = torch.where(sparse_indices < 0, keys, of_keys).long()
        return chosen.gather(-1, columns).sort(-1, descending=True).values

    @cached_property
    def _scores(self) -> Tensor:
        return all_scores(self.sample)


def files_in(folder: Path) -> list[Path]:
    return sorted(path for pattern in PATTERNS for path in folder.glob(pattern))


def read(path: Path) -> list[KernelCall]:
    """Read the calls of a file, and check all that it names.

    Raises:
        ValueError: the file holds no such calls.
    """
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        entries = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return [_call(entry) for entry in entries]
    except (
        OSError, EOFError, LookupError, TypeError, ValueError, RuntimeError, lzma.LZMAError,
        pickle.UnpicklingError, zipfile.BadZipFile,
    ) as error:  # fmt: skip
        text = str(error).splitlines()[0] if str(error) else ""
        raise ValueError(
            f"{path.name}: expected recorded calls of kernels, but {type(error).__name__}: {text}"
        ) from error


def _call(entry: Mapping[str, Any]) -> KernelCall:
    operator, what = str(entry["operator"]), str(entry["what"])
    arguments = dict(entry["arguments"])
    if operator == "sparse_flash_attention" and "layout_key" in arguments:
        # The name of layout_kv when the calls were recorded.
        arguments["layout_kv"] = arguments.pop("layout_key")
    sample = sample_of(operator, what, arguments)
    outputs = dict(entry["outputs"])
    for name, x in outputs.items():
        if name not in BOUNDS[operator].output_names or not isinstance(x, Tensor):
            raise ValueError(f"{operator} has no output {name!r}")
    return KernelCall(sample, outputs)
