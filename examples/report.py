"""Output of a run: a progress line during training, a table and a plot at the end."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

SELECTIONS = {
    "dense": "all causal keys",
    "ideal": "ideal top-k",
    "indexer": "lightning indexer",
    "recent": "most recent k",
    "random": "random k",
}
"""The selections of keys compared at the end, and their labels."""

COLORS = {
    "dense": "#333333",
    "ideal": "#7aa974",
    "indexer": "#c8552b",
    "recent": "#5b84b1",
    "random": "#a8a8a8",
}


class Progress:
    """A line redrawn in place on a terminal; a new one every ``every`` steps elsewhere."""

    WIDTH = 24

    def __init__(self, first_step: int, total: int, tokens_per_step: int, every: int) -> None:
        self.total, self.tokens_per_step, self.every = total, tokens_per_step, every
        self.done, self.interactive = first_step, sys.stdout.isatty()
        self.marks = [(first_step, time.perf_counter())]

    def update(self, phase: str, bits_per_byte: float, kl: float | None) -> None:
        self.done += 1
        # The speed over the last few steps: it differs between phases, and on a busy machine.
        self.marks = [*self.marks[-20:], (self.done, time.perf_counter())]
        (step, start), (_, now) = self.marks[0], self.marks[-1]
        speed = (self.done - step) * self.tokens_per_step / (now - start)
        numbers = (
            f"step {self.done}/{self.total}  {phase:<6}  {bits_per_byte:.3f} bits/byte  "
            + ("" if kl is None else f"KL {kl:.4f} nats/token  ")
            + f"{speed:,.0f} tokens/s"
        )
        last = self.done == self.total
        if not last:
            seconds = (self.total - self.done) * self.tokens_per_step / speed
            left = f"{seconds / 60:.0f} min" if seconds > 99 else f"{seconds:.0f} s"
            numbers += f"  {left} left"
        if self.interactive:
            filled = self.WIDTH * self.done // self.total
            bar = "█" * filled + "░" * (self.WIDTH - filled)
            # A line that wraps could not be redrawn.
            line = f"{numbers}  {bar}"[: shutil.get_terminal_size().columns - 1]
            print(f"\r\033[K{line}", end="\n" if last else "", flush=True)
        elif last or self.done % self.every == 0:
            print(numbers, flush=True)


def summary_table(metrics: dict[str, Any]) -> str:
    held_out = metrics["held_out"]
    dense = held_out["bits_per_byte"]["dense"]
    lines = [
        f"Held-out text, k = {metrics['top_k']} of up to {metrics['sequence_length']} keys",
        "",
        f"{'attention over':<20}{'attention mass':>16}{'bits/byte':>12}{'vs dense':>11}",
    ]
    for name, label in SELECTIONS.items():
        mass, bits = held_out["attention_mass"][name], held_out["bits_per_byte"][name]
        lines.append(f"{label:<20}{mass:>16.1%}{bits:>12.4f}{bits / dense - 1:>+11.2%}")
    return "\n".join(lines)


def _smooth(values: list[float], window: int) -> list[float]:
    """Mean of the last ``window`` values (fewer at the start)."""
    return [
        sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))
    ]


def draw_curve(axes: Axes, values: list[float], color: str) -> None:
    """Every step, and the mean of the last few."""
    steps = list(range(1, len(values) + 1))
    window = max(1, len(values) // 40)
    axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8, label="each step")
    axes.plot(
        steps, _smooth(values, window), color=color, linewidth=2, label=f"mean of {window} steps"
    )
    axes.set_xlim(0.5, len(values) + 0.5)
    axes.set_xlabel("training step")
    axes.legend(loc="best", frameon=False)


def _draw_phases(axes: Axes, values: list[float], warmup_steps: int, color: str) -> None:
    draw_curve(axes, values, color)
    axes.axvspan(0.5, warmup_steps + 0.5, color="#f1ead9", zorder=0)
    for start, end, name in (
        (0, warmup_steps, "dense warm-up"),
        (warmup_steps, len(values), "sparse training"),
    ):
        axes.text(
            (start + end + 1) / 2, 0.97, name, transform=axes.get_xaxis_transform(),
            ha="center", va="top", color="#6b6350",
        )  # fmt: skip
    axes.set_ylim(0, 1.15 * sorted(values)[int(0.99 * (len(values) - 1))])


def _draw_bars(axes: Axes, values: dict[str, float], numbers: dict[str, str]) -> None:
    names = list(values)
    bars = axes.bar(
        [SELECTIONS[name].replace(" ", "\n", 1) for name in names],
        [values[name] for name in names],
        color=[COLORS[name] for name in names],
        width=0.68,
    )
    axes.bar_label(bars, [numbers[name] for name in names], padding=3)


def plot(metrics: dict[str, Any], path: Path) -> None:
    """Four panels: both training curves, and both comparisons on held-out text."""
    history, held_out = metrics["history"], metrics["held_out"]
    mass, bits = held_out["attention_mass"], held_out["bits_per_byte"]
    # Any: matplotlib types the keys as the literal names of all its settings.
    style: dict[Any, Any] = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titleweight": "bold",
    }
    with plt.rc_context(style):
        figure, ((lm, kl), (left, right)) = plt.subplots(2, 2, figsize=(12, 8.4))
        _draw_phases(lm, history["bits_per_byte"], metrics["warmup_steps"], COLORS["dense"])
        lm.set_title("Language model")
        lm.set_ylabel("training loss, bits per byte")
        _draw_phases(kl, history["kl"], metrics["warmup_steps"], COLORS["indexer"])
        kl.set_title("Indexer against the attention it imitates")
        # After the warm-up the KL is over fewer keys, which is part of the drop between the phases.
        kl.set_ylabel("KL over the attended keys, nats per token")

        shown = {name: mass[name] for name in ("random", "recent", "indexer", "ideal")}
        _draw_bars(left, shown, {name: f"{value:.1%}" for name, value in shown.items()})
        left.set_title(f"Attention mass captured by k = {metrics['top_k']} keys")
        left.set_ylabel("share of dense attention, held-out text")
        left.set_ylim(0, 1.08)
        left.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))

        shown = {name: bits[name] for name in ("random", "recent", "indexer", "ideal", "dense")}
        _draw_bars(
            right,
            shown,
            {
                name: f"{value:.3f}\n({value / bits['dense'] - 1:+.1%})"
                for name, value in shown.items()
            },
        )
        right.set_title("Language model attending to those keys only")
        right.set_ylabel("bits per byte, held-out text")
        right.set_ylim(0, 1.2 * max(shown.values()))
        figure.suptitle(
            f"Training a lightning indexer: {len(history['kl'])} steps on the Python standard "
            f"library, sequences of {metrics['sequence_length']} bytes",
            fontsize=14,
        )
        figure.tight_layout(rect=(0, 0, 1, 0.98), h_pad=2.5, w_pad=2.5)
        figure.savefig(path, dpi=130)
        plt.close(figure)
