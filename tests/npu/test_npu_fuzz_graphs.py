"""A few random captures; `python -m cann_simulator tests/fuzz/run.py --only 'npu/*'` makes more."""

from __future__ import annotations

import pytest
from conftest import TASK_QUEUE
from fuzz import npu_graphs, run

pytestmark = pytest.mark.skipif(TASK_QUEUE == 2, reason="torch_npu captures no graph at level 2")

CASES_OF_A_CLASS = 30


@pytest.mark.parametrize("name", ["npu/graphs/calls", "npu/graphs/training"])
def test_random_captures(name: str) -> None:
    for number in range(CASES_OF_A_CLASS):
        run.run_case(npu_graphs.CASES[name], run.case_seed(0, name, number))
