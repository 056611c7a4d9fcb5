"""The ranks end with the last of these tests: idle, they would keep their memory to the end."""

from __future__ import annotations

import processes
import pytest


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path.parent != item.path.parent:
        processes.end()
