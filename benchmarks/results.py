"""The results of benchmarks in a JSON file, by processor: measured with what, where and when.

Every benchmark takes `--json FILE` and adds its rows to those of its processor. A row that is
measured again replaces its predecessor, so that one benchmark can be repeated alone.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "torch_npu", "transformers", "ascend_attn_ops")
# Matrix products of torch and of this project select their code by these.
FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "sve", "bf16", "i8mm")

Figures = dict[str, float]
"""Of one row, in seconds, bytes and operations per second, and the sizes that belong to it."""


@dataclass
class Results:
    """Figures that one processor measured, by benchmark, case and implementation."""

    about: dict[str, Any] = field(default_factory=dict)
    rows: dict[tuple[str, str, str], Figures] = field(default_factory=dict)

    @property
    def cpu(self) -> str:
        return str(self.about["machine"]["cpu"])

    def cases(self, *benchmarks: str) -> dict[str, dict[str, Figures]]:
        """Return the figures of benchmarks by case and implementation, in the order measured."""
        found: dict[str, dict[str, Figures]] = {}
        for benchmark in benchmarks:
            for (name, case, implementation), figures in self.rows.items():
                if name == benchmark:
                    found.setdefault(case, {})[implementation] = figures
        return found


def load(path: Path) -> list[Results]:
    """Return what each processor measured, in the order of the file."""
    found = []
    for content in json.loads(path.read_text()):
        rows = {}
        for row in content.pop("rows"):
            key = (row.pop("benchmark"), row.pop("case"), row.pop("implementation"))
            rows[key] = row
        found.append(Results(content, rows))
    return found


def save(path: Path, machines: Sequence[Results]) -> None:
    """One row a line, so that a difference between two runs can be read."""
    texts = []
    for results in machines:
        about = json.dumps(results.about, indent=1).removesuffix("\n}")
        lines = [
            json.dumps(dict(zip(("benchmark", "case", "implementation"), key, strict=True)) | row)
            for key, row in results.rows.items()
        ]
        texts.append(f'{about},\n "rows": [\n' + ",\n".join(lines) + "\n]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[" + ",\n".join(texts) + "]\n")


def of_processor(machines: Sequence[Results], cpu: str) -> Results | None:
    return next((results for results in machines if results.cpu == cpu), None)


class Recorder:
    """Adds rows of one benchmark to the file; without a file, does nothing.

    Implementations of this project are called "ours", or "ours, " and a part or variant.
    """

    def __init__(self, benchmark: str, path: Path | None, threads: int | None = None) -> None:
        self.benchmark, self.path, self.threads = benchmark, path, threads

    def add(self, case: str, implementation: str, **figures: float) -> None:
        if self.path is None:
            return
        machines = load(self.path) if self.path.exists() else []
        results = of_processor(machines, processor())
        if results is None:
            results = Results({"machine": {"cpu": processor()}})
            machines.append(results)
        results.about["date"] = date.today().isoformat()
        if self.threads is not None:
            results.about["machine"].setdefault("threads", self.threads)
        # torch_npu is in an environment of its own.
        results.about.setdefault("versions", {}).update(versions())
        row = results.rows.setdefault((self.benchmark, case, implementation), {})
        row.update({name: float(f"{value:.5g}") for name, value in figures.items()})
        save(self.path, machines)


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def processor() -> str:
    """Name the processor, with those of FEATURES that it has."""
    try:
        about = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    name = re.search(r"^model name\s*: (.*)", about, re.M)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)", about, re.M)
    available = set(flags[1].split()) if flags else set()
    features = [feature.upper() for feature in FEATURES if feature in available]
    return f"{name[1] if name else platform.machine()} ({', '.join(features)})"
