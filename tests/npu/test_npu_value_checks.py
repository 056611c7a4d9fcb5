"""The checked mode: the host reads values before a launch, and raises what the CPU raises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ascend_attn_ops as ops
import cann_simulator
import pytest
import torch
from ascend_attn_check.gradients import outputs_and_gradients
from ascend_attn_check.samples.sparse import SparseCase
from device_samples import DEVICE_RECIPES, to_npu
from support.checked_calls import CHECKED_CALLS, RIGHT_CALLS, CheckedCall
from support.samples import OPERATORS, WRONG_CALLS, Recipe, Sample, WrongCall, as_tuple
from support.simulated_npu import attention_functions, captured, once, run_in_new_process
from support.tolerance import assert_same_bits

# Its kernel reads no values that could be wrong.
UNCHECKED = ("attention_update",)
# Which are wrong by their memory or their device; and statistics, which the forward makes and the
# CPU alone reads.
OF_OTHER_RULES = ("key", "value", "key_cache", "value_cache", "softmax_max", "softmax_sum")


def is_of_values(row: WrongCall) -> bool:
    if row.on_meta or row.operator.name in UNCHECKED or row.argument in OF_OTHER_RULES:
        return False
    return not any(x.is_meta for x in row.wrong().tensors.values())


VALUE_RULES = [row for row in WRONG_CALLS if is_of_values(row)]


def error_of(call: Callable[[], object]) -> tuple[type[Exception], str]:
    with pytest.raises((TypeError, ValueError, RuntimeError)) as raised:
        call()
    return raised.type, str(raised.value)


@contextmanager
def nothing_launched() -> Iterator[None]:
    with cann_simulator.recorded_calls() as calls:
        yield
    assert not attention_functions(calls)


def wrong_index(operator: str) -> tuple[Sample, str]:
    """A call on the CPU with a wrong index, and its error."""
    rows = (row for row in VALUE_RULES if row.operator.name == operator)
    sample = next(row for row in rows if row.argument == "sparse_indices").wrong()
    return sample, error_of(lambda: sample.call(torch.ops.ascend))[1]


def test_every_operator_has_wrong_values() -> None:
    assert {row.operator.name for row in VALUE_RULES} == OPERATORS.keys() - set(UNCHECKED)


@pytest.mark.parametrize("row", VALUE_RULES, ids=lambda row: f"{row.operator.name}-{row.id}")
def test_the_error_is_that_of_the_cpu(row: WrongCall) -> None:
    sample = row.wrong()
    with ops.limits(row.limits):
        expected = error_of(lambda: sample.call(torch.ops.ascend))
        on_npu = to_npu(sample)
        with ops.check_values(), nothing_launched():
            assert error_of(lambda: on_npu.call(torch.ops.ascend)) == expected


@pytest.mark.parametrize("recipe", DEVICE_RECIPES, ids=lambda recipe: recipe.id)
def test_right_calls(recipe: Recipe) -> None:
    sample = recipe.make(torch.bfloat16)
    with ops.check_values():
        on_npu = outputs_and_gradients(to_npu(sample))
    for actual, expected in zip(on_npu, outputs_and_gradients(sample), strict=True):
        assert_same_bits(tuple(x.cpu() for x in actual), expected)


@pytest.mark.parametrize(
    "recipe", [x for x in DEVICE_RECIPES if not x.operator.name.endswith("_grad")],
    ids=lambda recipe: recipe.id,
)  # fmt: skip
def test_without_the_mode_nothing_waits(recipe: Recipe) -> None:
    """But for some gradients, which wait for lengths (tests/npu/test_npu_graphs.py)."""
    sample = to_npu(recipe.make(torch.bfloat16))

    def waits() -> int:
        before = cann_simulator.waits()
        sample.call(torch.ops.ascend)
        return cann_simulator.waits() - before

    assert waits() == 0
    with ops.check_values():
        checked = waits()
    integers = (torch.int32, torch.int64)
    read = [x for x in sample.tensors.values() if x.dtype in integers and not x.is_cpu]
    assert checked >= len(read)
    assert waits() == 0


@pytest.mark.usefixtures("no_limits")
@pytest.mark.parametrize("call", CHECKED_CALLS, ids=lambda x: x.id)
def test_what_the_device_cannot_do(call: CheckedCall) -> None:
    sample = call.make()
    with ops.check_values():
        expected = error_of(lambda: sample.call(torch.ops.ascend))
        on_npu = to_npu(sample)
        with nothing_launched():
            assert error_of(lambda: on_npu.call(torch.ops.ascend)) == expected


@pytest.mark.usefixtures("no_limits")
@pytest.mark.parametrize("make", RIGHT_CALLS)
def test_what_the_device_can_do(make: Callable[[], Sample]) -> None:
    on_npu = to_npu(make())
    with ops.check_values():
        actual = as_tuple(on_npu.call(torch.ops.ascend))
    expected = as_tuple(make().call(torch.ops.ascend))
    assert_same_bits(tuple(x.cpu() for x in actual), expected)


@pytest.mark.usefixtures("no_limits")
def test_blocks_nest_and_hold_in_every_thread() -> None:
    sample, expected = wrong_index("sparse_flash_attention")
    on_npu = to_npu(sample)
    messages = []

    def call() -> None:
        with ops.limits(None):
            messages.append(error_of(lambda: on_npu.call(torch.ops.ascend))[1])

    with ops.check_values():
        with ops.check_values():
            pass
        with nothing_launched():
            call()
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
    assert messages == [expected, expected]


@pytest.mark.usefixtures("no_limits")
def test_a_gradient_is_checked_when_it_runs() -> None:
    case = SparseCase(rope=8, heads=8, absorbed=True)
    sample = OPERATORS["sparse_flash_attention"].make(case, torch.bfloat16)
    indices = sample.tensors["sparse_indices"].clone()
    indices[..., -1] = -1
    leaf = to_npu(sample.replace(sparse_indices=indices)).requires_grad(("query",))
    with ops.check_values():
        out = leaf.call(torch.ops.ascend)[0]
        with nothing_launched():
            kind, message = error_of(out.sum().backward)
    assert kind is ValueError
    assert message.startswith("ascend::sparse_flash_attention_grad: sparse_indices: expected no -1")


@pytest.mark.usefixtures("no_limits")
def test_an_update_of_a_graph_does_not_wait() -> None:
    x = torch.ones(1, 4, 2, 16, dtype=torch.bfloat16, device="npu")
    mask = torch.ones(2048, 2048, dtype=torch.bool, device="npu").triu(1)
    options: dict[str, Any] = {
        "num_heads": 2, "layout": "BSND", "scale_value": 1.0, "sparse_mode": 2, "atten_mask": mask,
        "workspace": torch.empty(0, dtype=torch.uint8, device="npu"), "out": [torch.empty_like(x)],
    }  # fmt: skip
    torch.npu.synchronize()
    before = cann_simulator.waits()
    with ops.check_values():
        torch.ops.ascend.prompt_flash_attention.relaunch(x, x, x, **options)
    assert cann_simulator.waits() == before
    assert torch.equal(options["out"][0], x)


@captured
@pytest.mark.usefixtures("no_limits")
def test_a_capture_is_not_checked_and_says_so() -> None:
    out, err = run_in_new_process(
        """
        import torch, ascend_attn_ops as ops
        from device_samples import first
        sample = first("sparse_flash_attention").make(torch.bfloat16).to("npu")
        expected = sample.call(torch.ops.ascend)[0]
        graph = torch.npu.NPUGraph()
        with ops.check_values(), torch.npu.graph(graph):
            for _ in range(2):
                out = sample.call(torch.ops.ascend)[0]
        graph.replay()
        print(torch.equal(out, expected))
        """
    )
    assert out.split() == ["True"]
    assert err.count("sparse_flash_attention: the values of calls in a graph are not") == 1


@once
@pytest.mark.parametrize("value", ["1", "0", ""])
def test_the_environment_asks_for_it(value: str) -> None:
    out, _ = run_in_new_process(
        """
        import torch, ascend_attn_ops as ops
        key = torch.ones(1, 1, 16, dtype=torch.bfloat16, device="npu")
        cache = torch.zeros(2, 16, 1, 16, dtype=torch.bfloat16, device="npu")
        for slots in ([3], [32]):
            slots = torch.tensor(slots, dtype=torch.int32, device="npu")
            try:
                ops.scatter_pa_kv_cache_(key, cache, slots)
                torch.npu.synchronize()
                print("launched")
            except (ValueError, RuntimeError) as error:
                print(type(error).__name__)
        """,
        ASCEND_ATTN_OPS_CHECK=value,
    )
    assert out.split() == ["launched", "ValueError" if value == "1" else "RuntimeError"]
