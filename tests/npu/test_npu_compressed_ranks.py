"""DeepSeek-V4's attention with its tokens on several simulated NPUs, as on one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import DEVICE
from test_npu_hccl import run_ranks

pytestmark = pytest.mark.skipif(
    DEVICE != ("A2", "9.1"), reason="independent of the device: on the first"
)


@pytest.mark.parametrize("ranks", [2, 3])
def test_results_are_those_of_one_device(ranks: int) -> None:
    result = run_ranks(ranks, Path(__file__).with_name("compressed_ranks.py"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("done") == ranks
