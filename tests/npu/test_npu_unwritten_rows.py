"""Rows that the device leaves unwritten never reach the caller.

Every allocation of the process is one of the simulated device, which fills new memory with 0x7F, so
that a row that nothing has written differs from the CPU's.
"""

from __future__ import annotations

import pytest
from support.samples import DIFFERENTIABLE_RECIPES, RECIPES
from support.simulated_npu import once, run_in_new_process

pytestmark = once

NEW_MEMORY = {"PYTORCH_NO_NPU_MEMORY_CACHING": "1"}


def test_memory_is_new() -> None:
    text, _ = run_in_new_process(
        """
        import torch, torch_npu
        for _ in range(2):
            x = torch.empty(64, dtype=torch.int32, device="npu")
            print((x.cpu() == 0x7F7F7F7F).all().item())
            x.zero_()
            del x
        """,
        **NEW_MEMORY,
    )
    assert text.split() == ["True", "True"]


def test_the_device_leaves_rows_unwritten() -> None:
    """Through torch_npu's operator: what is asserted below is not true without our launch."""
    text, _ = run_in_new_process(
        """
        import torch, torch_npu
        from ascend_attn_check.samples import OPERATORS
        from ascend_attn_check.samples.sparse import SparseCase

        case = SparseCase(layout="TND", lengths=((3, 2), (5, 4)), tail=(4, 3), index_heads=8, k=4)
        x = OPERATORS["lightning_indexer"].make(case, torch.bfloat16).to("npu").arguments
        indices, _ = torch_npu.npu_lightning_indexer(
            x["query"], x["key"], x["weights"], layout_query="TND", layout_key="TND",
            actual_seq_lengths_query=x["actual_seq_lengths_query"],
            actual_seq_lengths_key=x["actual_seq_lengths_key"], sparse_count=4, sparse_mode=3,
            return_value=True)
        unwritten = indices.cpu() == 0x7F7F7F7F
        print(unwritten[-4:].all().item(), unwritten[:-4].any().item())
        """,
        **NEW_MEMORY,
    )
    assert text.split() == ["True", "False"]


@pytest.mark.parametrize("half", ["forward", "gradients"])
def test_every_row_is_written(half: str) -> None:
    """All samples: padding, empty sequences, rows without keys, in every layout and mode."""
    text, _ = run_in_new_process(
        f"""
        import ascend_attn_ops, cann_simulator, torch
        from ascend_attn_check.gradients import gradients
        from device_samples import as_launched, is_launched
        from support.samples import DIFFERENTIABLE_RECIPES, RECIPES
        from support.tolerance import assert_same_bits

        forward = {half == "forward"}
        ran = set()
        for recipe in filter(is_launched, RECIPES if forward else DIFFERENTIABLE_RECIPES):
            sample = as_launched(recipe.make(torch.bfloat16))

            def call(sample):
                return sample.call(torch.ops.ascend) if forward else gradients(sample)

            with ascend_attn_ops.limits(None), cann_simulator.unchecked(
                "bounds", "hang", "results"
            ):
                assert_same_bits(tuple(x.cpu() for x in call(sample.to("npu"))), call(sample))
            ran.add(recipe.operator.name)
        print(*sorted(ran))
        """,
        **NEW_MEMORY,
    )
    recipes = RECIPES if half == "forward" else DIFFERENTIABLE_RECIPES
    assert text.split() == sorted({x.operator.name for x in recipes})
