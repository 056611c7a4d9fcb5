"""The learning rate over the steps of a training run, and its checkpoints."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first steps, then cosine decay to 5%."""
    rise = min(1.0, (step + 1) / (1 + 0.05 * steps))
    return rise * (0.525 + 0.475 * math.cos(math.pi * step / steps))


def save(state: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint. A run killed at any moment leaves a complete one."""
    partial = path.with_suffix(".tmp")
    torch.save(state, partial)
    # Renaming is atomic.
    os.replace(partial, path)


def checkpoints(out: Path) -> list[Path]:
    """Return the complete checkpoints of several ranks, the newest last."""
    return sorted(path for path in out.glob("checkpoint-*") if path.suffix != ".partial")


def saved_recipe(out: Path) -> dict[str, Any]:
    """Return the recipe of the newest checkpoint; none without one."""
    for folder in reversed(checkpoints(out)):
        return json.loads((folder / "about.json").read_text())["recipe"]
    path = out / "checkpoint.pt"
    return torch.load(path, mmap=True, weights_only=True)["recipe"] if path.exists() else {}


def check_recipe(recipe: Mapping[str, Any], saved: Mapping[str, Any], path: Path) -> None:
    """End if a checkpoint was trained with other options."""
    for name, value in recipe.items():
        if saved[name] != value:
            raise SystemExit(
                f"--resume: {path} was trained with --{name.replace('_', '-')} "
                f"{saved[name]}, not {value}"
            )
