"""The tables and pictures of the documentation: what they show, and how they are made of results.

The pages say where they belong: see write_tables.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from results import Figures, Results

By = Mapping[str, Figures]  # implementation
Cell = Callable[[By, str], str]
"""Writes a cell, given the figures of a case and the implementation that the row shows."""
NOTHING = "\N{EN DASH}"
NOT_MEASURED = "Not measured yet: run the benchmark below."
# Names of results that the tables spell out.
SPELT_OUT = {
    "forward+backward": "forward + backward",
    "training step": "training step, ms",
}  # fmt: skip


def short(value: float) -> str:
    """Write a number with three digits, or all that are before the point."""
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(0, digits)}f}"


def cell(write: Callable[[Figures], str], name: str = "") -> Cell:
    """A figure of the implementation `name`, or of the row's own; a dash if it was not measured."""
    return lambda by, own: write(by[name or own]) if (name or own) in by else NOTHING


def ms(name: str = "") -> Cell:
    return cell(lambda x: short(x["seconds"] * 1e3), name)


def microseconds(name: str = "") -> Cell:
    return cell(lambda x: short(x["seconds"] * 1e6), name)


def share_of_peak(name: str = "") -> Cell:
    return cell(lambda x: f"{x['gflops'] / x['peak_gflops']:.0%}", name)


def megabytes(name: str = "") -> Cell:
    return cell(lambda x: short(x["bytes"] / 1e6), name)


def takes(name: str = "", beside: str = "ours", digits: int = 1) -> Cell:
    """How many times as long as another an implementation takes; nothing for the other itself."""

    def ratio(by: By, own: str) -> str:
        if own == beside and not name:
            return ""
        write = cell(lambda x: f"{x['seconds'] / by[beside]['seconds']:.{digits}f}x", name)
        return write(by, own)

    return ratio


def beside_torch_npu(name: str) -> Cell:
    def text(by: By, own: str) -> str:
        ratio = by[name]["seconds"] / by["torch_npu"]["seconds"]
        return f"{microseconds(name)(by, own)} ({ratio:.2f})"

    return text


def markdown(labels: Sequence[str], columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of which `labels` are columns of text, and `columns` those of figures."""
    rule = ["---"] * len(labels) + ["---:"] * len(columns)
    header = (*labels, *columns)
    lines = ["".join(f"| {x} " if x else "| " for x in cells) + "|" for cells in (header, *rows)]
    return "\n".join([lines[0], "|" + "|".join(rule) + "|", *lines[1:]])


@dataclass(frozen=True)
class Table:
    """Rows are the cases of `benchmarks` whose names match `case`, and which `needs` has measured.

    The groups of `case` fill the texts of `labels`, by heading, and those of `numbers`, which are
    aligned as figures. A row is about the first implementation; with `each`, a case has a row for
    each of these, and their names are the last label.
    """

    benchmarks: str
    case: str
    labels: dict[str, str]
    columns: dict[str, Cell]
    needs: str = ""
    numbers: dict[str, str] = field(default_factory=dict)
    each: dict[str, str] = field(default_factory=dict)
    sort: bool = False

    def text(self, results: Results) -> str:
        """Return the table, or nothing if it would have no rows."""
        rows = []
        for case, by in results.cases(*self.benchmarks.split()).items():
            found = re.fullmatch(self.case, case)
            if found and (not self.needs or self.needs in by):
                groups = [SPELT_OUT.get(x, x) for x in found.groups()]
                shown = [x.format(*groups) for x in (self.labels | self.numbers).values()]
                for name in self.each or [next(iter(by))]:
                    figures = (write(by, name) for write in self.columns.values())
                    rows.append([*shown, *filter(None, [self.each.get(name)]), *figures])
                    shown = [""] * len(shown)
        if self.sort:
            rows.sort(key=lambda row: row[0].strip("`"))
        labels = [*self.labels, *([""] if self.each else [])]
        return markdown(labels, [*self.numbers, *self.columns], rows) if rows else ""


def training(
    benchmark: str, case: str, each: dict[str, str], beside: str, columns: dict[str, Cell]
) -> Table:
    columns = {
        "tokens/s": cell(lambda x: short(x["tokens"] / x["seconds"])),
        f"time beside {beside.rpartition(', ')[2]}": takes(beside=beside),
        "peak memory of a step, MB": megabytes(),
        **columns,
    }
    return Table(benchmark, case, {"tokens": "{0}"}, columns, each=each)


def share_of_operators(by: By, own: str) -> str:
    return f"{by[own]['share_of_operators']:.0%}" if own.startswith("ours") else ""


def machine(machines: Sequence[Results]) -> str:
    about, versions = machines[0].about, machines[0].about["versions"]
    count = about["machine"]["threads"]
    packages = ", ".join(f"{x} {versions[x]}" for x in ("torch", "torch_npu", "transformers"))
    return (
        f"The figures are of {about['date']}, with {packages}, on\n"
        f"{count} thread{'' if count == 1 else 's'} of this processor: {machines[0].cpu}."
    )


def widest(cpu: str) -> str:
    """Name a processor with one of its features: `AMD EPYC, AVX2`, `Intel Xeon, AVX512F`."""
    name, _, features = cpu.replace("(R)", "").removesuffix(")").partition(" (")
    name = name.partition(" Processor @")[0]
    present = features.split(", ")
    order = ("AMX_BF16", "AVX512_BF16", "AVX512F", "AVX2", "SVE")
    return ", ".join([name, *(x for x in order if x in present)][:2])


# The cases that the table of all processors shows.
COMPARED = re.compile(
    r".*S=(1024|8192) K=256 N1=(64|8) bfloat16|.*S=1024 K=256|.*S=4096 K=1024|"
    r"S=2048 N=16 D=128 (bfloat16|int8) causal.*"
)


def processors(machines: Sequence[Results]) -> str:
    """The operators that all processors have measured."""
    rows = []
    for name in ("sparse_flash_attention", "sparse_flash_mla", "lightning_indexer",
                 "flash_attention_score", "prompt_flash_attention"):  # fmt: skip
        measured = [results.cases(name) for results in machines]
        for case in filter(COMPARED.fullmatch, measured[0]):
            found = [cases.get(case, {}) for cases in measured]
            if all("gflops" in by.get("ours", {}) for by in found):
                first, _, sizes = case.partition(" ")
                operator, sizes = (name, case) if "=" in first else (first, sizes)
                cells = [write(by, "ours") for by in found for write in (ms(), share_of_peak())]
                rows.append([f"`{operator}`", sizes, *cells])
    header = [f"{widest(x.cpu)}: ms" for x in machines]
    return markdown(
        ["", "sizes"], [y for x in header for y in (x, "share of its matmul peak")], rows
    )


PEAK = "share of the matmul peak"
OURS = {"ours, ms": ms(), PEAK: share_of_peak()}

TABLES: dict[str, Table | Callable[[Sequence[Results]], str]] = {
    "machine": machine, "processors": processors,
    "sparse": Table(
        "sparse_flash_attention lightning_indexer", r"(\w+) .*", {"": "`{0}`"},
        {
            **OURS,
            "torch takes, all pairs and a mask": takes("torch, masking"),
            "torch takes, gathering the keys": takes("torch, gathering"),
        },
        needs="torch, gathering",
    ),
    "training_step": training(
        "training_step", "(1024|4096|16384) tokens",
        {"ours, sparse": "sparse", "ours, dense": "dense", "eager": "plain torch"},
        "ours, sparse", {"time in our operators": share_of_operators},
    ),
    "transformers_training": training(
        "transformers_training", r"(\d+) tokens",
        {"ours": "`enable_dsa`", "eager": "transformers, eager", "sdpa": "transformers, sdpa"},
        "ours", {},
    ),
    "serving": Table(
        "fused_infer_attention_score", r"(.*), (.*), (.*)",
        {"sizes": "{0}", "queries over keys": "{1}", "keys in": "{2}"},
        {
            "ours, ms": ms(), "SDPA takes": takes("torch SDPA"),
            "one reading of the keys, ms": ms("reading"), "the products, ms": ms("products"),
        },
    ),
    "decode": Table(
        "sparse_decode", r"B=(\d+) keys=(\d+)", {},
        {
            "indexer": ms("ours, indexer"),
            "attention to K keys": ms("ours, attention"),
            "both": ms("ours, sparse"),
            "attention to all keys": ms("ours, dense"),
            "torch, all keys": ms("torch"),
            "limit of both": ms("limit"),
        },
        needs="torch", numbers={"B": "{0}", "keys": "{1}"},
    ),
    "dense": Table(
        "flash_attention_score", "(.* bfloat16 (?!full).*), (.*)", {"sizes": "{0}", "": "{1}"},
        {**OURS, "SDPA takes": takes("torch SDPA"), "formula takes": takes("torch formula")},
    ),
    "host_time": Table(
        "host_time", "(.*), level (1)", {"": "`{0}`"},
        {
            "`ascend_attn_ops`": beside_torch_npu("ours"),
            "`torch.ops.ascend`": beside_torch_npu("ours, torch.ops"),
            "torch_npu": microseconds("torch_npu"),
            "the two bare C calls": microseconds("two phases"),
        },
        numbers={"`TASK_QUEUE_ENABLE`": "{1}"},
    ),
}  # fmt: skip
