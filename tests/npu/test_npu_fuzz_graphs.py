"""A few random captures; `python -m cann_simulator tests/fuzz/run.py --only 'npu/*'` makes more."""

from __future__ import annotations

import pytest
from support.simulated_npu import captured, run_in_new_process

pytestmark = captured


@pytest.mark.parametrize("name", ["npu/graphs/calls", "npu/graphs/training"])
def test_random_captures(name: str) -> None:
    """Runs in a process of its own: cases set one thread, and threads that they start keep that."""
    output, _ = run_in_new_process(f"""
        import torch
        from fuzz import npu_graphs, run
        for number in range(30):
            run.run_case(npu_graphs.CASES["{name}"], run.case_seed(0, "{name}", number))
        print("30 cases")
    """)
    assert output.split()[-2:] == ["30", "cases"]
