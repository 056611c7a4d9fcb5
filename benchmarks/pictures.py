"""The pictures of docs/performance.md, drawn from the results of a run."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Picture:
    """Panels beside each other, each with a title, a figure and its scale and unit, against `x`."""

    benchmark: str
    case: str  # the beginning of its name
    x: str
    x_label: str
    size: tuple[float, float]
    panels: tuple[tuple[str, str, float, str], ...]

    def draw(self, results: Results, path: Path) -> None:
        cases = results.cases(self.benchmark).items()
        found = [by for case, by in cases if case.startswith(self.case)]
        with plt.rc_context(STYLE):
            figure, all_axes = plt.subplots(1, len(self.panels), figsize=self.size, squeeze=False)
            for axes, (title, y, scale, y_label) in zip(all_axes[0], self.panels, strict=True):
                for name, (label, color) in LINES.items():
                    measured = [by[name] for by in found if y in by.get(name, {})]
                    points = [(row[self.x], row[y] * scale) for row in measured]
                    if points:
                        line = zip(*points, strict=True)
                        axes.plot(*line, marker="o", color=color, label=label)
                set_scales(axes, sorted({row[self.x] for by in found for row in by.values()}))
                axes.set(title=title, xlabel=self.x_label, ylabel=y_label)
                axes.legend(frameon=False)
            figure.tight_layout(w_pad=2.5)
            figure.savefig(path, dpi=130)
            plt.close(figure)


def set_scales(axes: Axes, ticks: list[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


PICTURES = {
    "training_step.png": Picture(
        "training_step", "", "tokens", "tokens of the sequence", (11, 4.4),
        (
            ("Time", "seconds", 1, "seconds of a training step"),
            ("Memory", "bytes", 1e-6, "MB that a step adds at its peak"),
        ),
    ),
    "decode.png": Picture(
        "sparse_decode", "B=1 ", "keys", "keys of the sequence", (6.6, 4.4),
        (("One decoded token", "seconds", 1e3, "milliseconds of a layer, per token"),),
    ),
}  # fmt: skip
