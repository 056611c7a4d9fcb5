"""Draws the parts of the code for docs/design.md, from the tables that the tests hold them to.

python tools/house.py    # writes docs/images/house.svg
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.layers import AROUND, TREES, Part  # noqa: E402

PICTURE = ROOT / "docs/images/house.svg"
# Rows from the top, and of each part the first column and the number of columns; a part stands
# above what is below it.
PACKAGE_ROWS = [
    {"integrations": (1, 1), "distributed": (2, 1), "check": (3, 2)},
    {"npu_operators": (0, 1), "public": (1, 4)},
    {"flash_attn": (0, 1), "modules": (1, 2), "comparison": (3, 2)},
    {"operators": (0, 4), "reference": (4, 1)},
    {"vocabulary": (0, 5)},
]
CSRC_ROWS: list[dict[str, tuple[float, float]]] = [
    {"python": (1.5, 2)},
    {"autograd": (0, 1.5), "cpu": (1.5, 2), "npu": (3.5, 1.5)},
    {"ops": (0, 5)},
    {"dispatch": (0, 5)},
    {"core": (0, 5)},
]
COLUMN, HEIGHT, GAP = 134, 46, 22
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {height}" \
font-family="system-ui, sans-serif" font-size="13" role="img">
  <title>The parts of the code, and which stands on which</title>
  <defs>
    <marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" \
orient="auto"><path d="M0 0 8 4 0 8z" fill="#5a6472"/></marker>
  </defs>
  <rect width="960" height="{height}" rx="10" fill="#fff"/>"""


class Box(NamedTuple):
    left: float
    top: float
    width: float
    height: float = HEIGHT

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height


def brick(name: str, what: str, box: Box, title: str) -> Iterator[str]:
    middle, height = box.left + box.width / 2, box.top + box.height / 2
    yield f'  <g id="{name.replace(" ", "-")}" text-anchor="middle"><title>{title}</title>'
    yield (
        f'    <rect x="{box.left:g}" y="{box.top:g}" width="{box.width:g}" '
        f'height="{box.height:g}" rx="6" fill="#eceff4" stroke="#2664ab" stroke-width="1.5"/>'
    )
    label = name.rpartition("/")[2]
    yield (
        f'    <text x="{middle:g}" y="{height - 3:g}" font-weight="600" fill="#1b2430">'
        f"{label}</text>"
    )
    yield (
        f'    <text x="{middle:g}" y="{height + 14:g}" font-size="11" fill="#5a6472">{what}</text>'
    )
    yield "  </g>"


def panel(title: str, box: Box) -> Iterator[str]:
    yield (
        f'  <rect x="{box.left:g}" y="{box.top:g}" width="{box.width:g}" height="{box.height:g}" '
        'rx="10" fill="#f8fafc" stroke="#c3ccd8"/>'
    )
    yield (
        f'  <text x="{box.left + 14:g}" y="{box.top + 24:g}" font-size="14" font-weight="700" '
        f'fill="#2664ab">{title}</text>'
    )


def arrow(*points: tuple[float, float]) -> str:
    path = " L".join(f"{x:g} {y:g}" for x, y in points)
    return (
        f'  <path d="M{path}" fill="none" stroke="#5a6472" stroke-width="1.5" '
        'marker-end="url(#tip)"/>'
    )


def placed(rows: list[dict[str, tuple[float, float]]], left: float, top: float) -> dict[str, Box]:
    return {
        name: Box(left + COLUMN * first, top + row * (HEIGHT + GAP), COLUMN * columns - 12)
        for row, parts in enumerate(rows)
        for name, (first, columns) in parts.items()
    }


def bricks(tree: str, parts: dict[str, Part], boxes: dict[str, Box]) -> Iterator[str]:
    for name, part in parts.items():
        box = boxes[name]
        yield from brick(f"{tree}/{name}", part.what, box, f"{tree}: {name}")
        for other in part.below:
            under = boxes[other]
            x = (max(box.left, under.left) + min(box.right, under.right)) / 2
            yield arrow((x, box.bottom), (x, under.top - 1))


def svg() -> str:
    height = 50 + 5 * HEIGHT + 4 * GAP
    package, csrc = Box(20, 20, 690, height), Box(20, 20 + height + 34, 690, height)
    around = Box(740, 20, 200, csrc.bottom - 20)
    package_boxes = placed(PACKAGE_ROWS, package.left + 16, package.top + 38)  # type: ignore[arg-type]
    csrc_boxes = placed(CSRC_ROWS, csrc.left + 16, csrc.top + 38)
    lines = [
        HEAD.format(height=int(csrc.bottom + 20)),
        *panel("python/ascend_attn_ops/", package),
        *panel("csrc/", csrc),
        *panel("around them", around),
        *bricks("python", TREES["python"].parts, package_boxes),
        *bricks("csrc", TREES["csrc"].parts, csrc_boxes),
    ]
    bindings, vocabulary = csrc_boxes["python"], package_boxes["vocabulary"]
    x = bindings.left + bindings.width / 2
    lines.append(arrow((x, vocabulary.bottom), (x, bindings.top - 1)))
    step = (around.height - 38) / len(AROUND)
    for number, (name, what) in enumerate(AROUND.items()):
        top = around.top + 38 + number * step
        box = Box(around.left + 16, top, around.width - 32, step - 16)
        lines += brick(name, what, box, name)
        y = top + box.height / 2
        side = package if y < package.bottom else csrc
        lines.append(arrow((box.left, y), (side.right + 1, y)))
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(svg(), encoding="utf-8")
