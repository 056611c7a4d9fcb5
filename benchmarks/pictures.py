"""The pictures of docs/performance.md, drawn from the results of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator
from results import Results

# As in the pictures of the examples: ours in red, what it is compared with in quieter colours.
LINES = {
    "ours, sparse": ("sparse, ours", "#c8552b"),
    "ours, dense": ("dense, ours", "#333333"),
    "eager": ("plain torch, all pairs", "#5b84b1"),
    "torch": ("dense, torch", "#5b84b1"),
}
# Any: matplotlib types the keys as the literal names of all its settings.
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "lines.linewidth": 2,
    "lines.markersize": 5,
}
Series = Mapping[str, list[tuple[float, float]]]


def series_of(results: Results, benchmark: str, x: str, y: str, scale: float) -> Series:
    """Return the points of every line: figure `y`, times `scale`, against size `x`."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for by in results.cases(benchmark).values():
        for name in LINES:
            if y in by.get(name, {}):
                lines.setdefault(name, []).append((by[name][x], by[name][y] * scale))
    return lines


def draw(axes: Axes, lines: Series, x_label: str, y_label: str) -> None:
    for name, points in lines.items():
        label, color = LINES[name]
        axes.plot(*zip(*points, strict=True), marker="o", color=color, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({x for points in lines.values() for x, _ in points}))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.legend(frameon=False)


def training_step(results: Results, path: Path) -> None:
    with plt.rc_context(STYLE):
        figure, (time, memory) = plt.subplots(1, 2, figsize=(11, 4.4))
        tokens = "tokens of the sequence"
        draw(
            time,
            series_of(results, "training_step", "tokens", "seconds", 1),
            tokens,
            "seconds of a training step",
        )
        time.set_title("Time")
        draw(
            memory,
            series_of(results, "training_step", "tokens", "bytes", 1e-6),
            tokens,
            "MB that a step adds at its peak",
        )
        memory.set_title("Memory")
        figure.tight_layout(w_pad=2.5)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def decode(results: Results, path: Path) -> None:
    alone = Results(
        rows={
            key: figures
            for key, figures in results.rows.items()
            if key[0] == "sparse_decode" and figures.get("batch") == 1
        }
    )
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.6, 4.4))
        draw(
            axes,
            series_of(alone, "sparse_decode", "keys", "seconds", 1e3),
            "keys of the sequence",
            "milliseconds of a layer, per token",
        )
        axes.set_title("One decoded token")
        figure.tight_layout()
        figure.savefig(path, dpi=130)
        plt.close(figure)


PICTURES = {"training_step.png": training_step, "decode.png": decode}
