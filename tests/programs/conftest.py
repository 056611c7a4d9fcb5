"""Whole small programs, each judged by float64 arithmetic (plain.py) or by the stock package.

The programs import public names only and run within the default device limits.
"""

from __future__ import annotations

from collections.abc import Iterator

import plain
import pytest
import torch


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    torch.manual_seed(0)
    with plain.compiling_anew():
        yield
