"""Draws the pictures of docs/sparse_modes.md, each by the options in its description.

python docs/_ext/sparse_modes.py
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from ascend_attn_ops import sparse_mode_mask
from matplotlib.colors import ListedColormap

PAGE = Path(__file__).parents[1] / "sparse_modes.md"
PICTURE = re.compile(r"!\[`(--mode[^`]+)`\]\(([^)]+)\)")
COLOURS = ListedColormap(["#eceff4", "#2664ab"])
NAMES = {"pre": "pre_tokens", "next": "next_tokens", "prefix": "prefix"}


def draw(command: str, file: Path) -> None:
    options = {name: x.split(",") for name, x in re.findall(r"--(\w+)\s+(\S+)", command)}
    mode = int(options.pop("mode")[0])
    sequences = list(zip(options.pop("sq"), options.pop("skv"), strict=True))
    given = {NAMES[name]: int(x) for name, (x,) in options.items()}
    with_band = 0 if mode == 8 else len(sequences) - 1
    widths = [int(skv) for _, skv in sequences]
    figure, all_axes = plt.subplots(
        1, len(sequences), squeeze=False, width_ratios=widths, layout="constrained",
        figsize=(0.26 * sum(widths) + 1.2 * len(sequences), 4.4),
    )  # fmt: skip
    figure.suptitle(", ".join([f"sparse_mode {mode}", *(f"{x} {given[x]}" for x in given)]))
    for i, (axes, (sq, skv)) in enumerate(zip(all_axes[0], sequences, strict=True)):
        mask = sparse_mode_mask(mode, int(sq), int(skv), band=i == with_band, **given)
        axes.pcolormesh(mask.numpy(), cmap=COLOURS, vmin=0, vmax=1, edgecolors="white")
        axes.set(aspect="equal", xlabel="key j", ylabel="query i")
        axes.set_xticks([x + 0.5 for x in range(0, int(skv), 2)], range(0, int(skv), 2))
        axes.set_yticks([x + 0.5 for x in range(0, int(sq), 2)], range(0, int(sq), 2))
        axes.invert_yaxis()
        if len(sequences) > 1:
            axes.set_title(f"sequence {i}", fontsize="medium")
    figure.savefig(file, dpi=96, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    for command, file in PICTURE.findall(PAGE.read_text(encoding="utf-8")):
        draw(command, PAGE.parent / file)
