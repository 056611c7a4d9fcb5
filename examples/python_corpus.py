"""Real text that comes with every Python: the sources of its standard library, as bytes."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor

# Installed packages are not the standard library; tests and IDLE are missing from some
# distributions; the last two are generated tables.
EXCLUDED = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo",
    "encodings", "pydoc_data",
}  # fmt: skip
HELD_OUT_SHARE = 10


def load_corpus() -> tuple[Tensor, Tensor]:
    """Return training and held-out text, each (number of bytes,) uint8.

    One file in ten is held out, chosen by a checksum of its path: the same ones on every machine.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not EXCLUDED & set(path.relative_to(root).parts)
    )
    train, held_out = bytearray(), bytearray()
    for name in names:
        part = held_out if zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0 else train
        part += (root / name).read_bytes() + b"\0"
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def sample_windows(text: Tensor, count: int, length: int, seed: int) -> Tensor:
    """Sample ``count`` windows of ``length`` bytes, (count, length) int64, from the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length + 1, (count, 1), generator=generator)
    return text[starts + torch.arange(length)].long()
