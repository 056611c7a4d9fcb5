"""The child of a check, forked from a process that has torch imported."""

from __future__ import annotations

import pytest
from ascend_attn_check import runner
from support import fresh


@pytest.fixture
def forked_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PROCESSES", fresh.CONTEXT)
