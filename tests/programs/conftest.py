"""Whole small programs, each judged by float64 arithmetic (plain.py) or by the stock package.

The programs import public names only and run within the default device limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import dense_model
import dsa_model
import plain
import pytest
import torch


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    torch.manual_seed(0)
    with plain.compiling_anew():
        yield


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Calls a function while the attention of the programs is that of plain.py."""

    def call(function: Callable[..., Any], *args: Any) -> Any:
        with monkeypatch.context() as m:
            m.setattr(dense_model, "attention", plain.attention)
            m.setattr(dense_model, "packed_attention", plain.packed_attention)
            m.setattr(dsa_model, "sparse_attention", plain.of_all_keys)
            return function(*args)

    return call
