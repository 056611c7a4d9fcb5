"""What tests of every operator need."""

from __future__ import annotations

from collections.abc import Iterator

import ascend_attn_ops
import pytest


@pytest.fixture
def no_limits() -> Iterator[None]:
    """The samples are far smaller than what the device's tables allow."""
    with ascend_attn_ops.limits(None):
        yield
