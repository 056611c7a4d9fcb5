"""ascend_attn_ops.compare: the differences it reports, their places, and the calls it skips."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_check.samples import OPERATORS, Operator
from ascend_attn_ops.debug import comparison
from ascend_attn_ops.reference.call import as_tuple
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = [pytest.mark.usefixtures("no_limits"), pytest.mark.smoke]

QUERY = torch.randn(1, 6, 4, 64, dtype=torch.bfloat16)
KEY = torch.randn(1, 9, 2, 64, dtype=torch.bfloat16)
SAYS_WHY = torch.__version__ >= (2, 8)  # dynamo, of an exception in what it traces


def attend(query: Tensor = QUERY, key: Tensor = KEY, **options: Any) -> Tensor:
    options = {"num_heads": 4, "layout": "BSND", "sparse_mode": 3, **options}
    return ops.flash_attention_score(query, key, key, **options)[0]


class Changing(TorchDispatchMode):
    """Passes the outputs of an operator through a function: a device that computes wrong."""

    def __init__(self, operator: str, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self._operator, self._change = operator, change

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        return self._change(outputs) if func._schema.name == self._operator else outputs


class Faulty(Changing):
    """Adds to the first element of an output."""

    def __init__(self, operator: str, output: int, amount: float) -> None:
        def add(outputs: Any) -> Any:
            as_tuple(outputs)[output].view(-1)[:1] += amount
            return outputs

        super().__init__(f"ascend::{operator}", add)


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda x: x.name)
def test_right_calls_are_compared_and_do_not_differ(operator: Operator) -> None:
    cases = [x for x in operator.recipes if getattr(x.case, "scatter", "") != "Nct"]
    with ops.compare() as report:
        for recipe in cases[:3]:
            recipe.make(torch.bfloat16).clone().call(torch.ops.ascend)
    assert report.compared == {operator.name: 3}, report
    assert not report.differences, report


@pytest.mark.parametrize(
    ("operator", "output"),
    [
        pytest.param(operator, number, id=f"{operator.name}-{name}")
        for operator in OPERATORS.values()
        if not operator.in_place
        for number, name in enumerate(operator.output_names)
    ],
)
def test_a_wrong_element_of_any_output_is_noticed(operator: Operator, output: int) -> None:
    samples = (recipe.make(torch.bfloat16) for recipe in operator.recipes)
    sample = next(x for x in samples if x.call(torch.ops.ascend)[output].numel())
    with Faulty(operator.name, output, 3), ops.compare() as report:
        sample.call(torch.ops.ascend)
    (found,) = report.differences
    assert found.operator == operator.name
    assert found.number == 0
    assert str(found).startswith(f"call 0, {operator.name} at ")


def test_a_wrong_slot_of_a_cache_is_noticed() -> None:
    operator = OPERATORS["scatter_pa_kv_cache_"]
    sample = operator.small_sample().clone()

    def write(_: None) -> None:
        sample.tensors["key_cache"].view(torch.uint8).view(-1)[:1] ^= 1

    with Changing("ascend::scatter_pa_kv_cache_", write), ops.compare() as report:
        sample.call(torch.ops.ascend)
    (found,) = report.differences
    assert found.text.startswith("key_cache: 1 of ")


def test_backward_is_compared_and_places_are_lines_of_the_program() -> None:
    query = QUERY.clone().requires_grad_()
    with Faulty("flash_attention_score_grad", 0, 1), ops.compare() as report:
        out = attend(query)
        out.sum().backward()
    (found,) = report.differences
    assert found.operator == "flash_attention_score_grad"
    assert found.number == 1
    assert re.search(r"test_comparison\.py:\d+ in test_backward_is_compared", found.place)
    assert found.text.startswith("dq: 1 of ")
    assert report.compared == {"flash_attention_score": 1, "flash_attention_score_grad": 1}
    assert query.grad is not None  # of the program, wrong as it is
    assert re.search(r"flash_attention_score_grad +1 +1 +1", str(report))


def test_outputs_are_those_of_the_program() -> None:
    with Faulty("flash_attention_score", 0, 1), ops.compare():
        seen = attend()
    expected = attend()
    expected.view(-1)[:1] += 1
    assert torch.equal(seen, expected)


def test_every_nth_call_is_compared() -> None:
    with ops.compare(every=3) as report:
        for _ in range(7):
            attend()
    assert report.calls == {"flash_attention_score": 7}
    assert report.compared == {"flash_attention_score": 3}


def test_rtol_takes_the_place_of_the_bounds() -> None:
    with Faulty("flash_attention_score", 0, 0.1):
        with ops.compare() as bounds:
            attend()
        with ops.compare(rtol=0.5) as wide:
            attend()
        with ops.compare(rtol=0) as none:
            attend()
    assert [len(x.differences) for x in (bounds, wide, none)] == [1, 0, 1]


def test_an_exchanged_key_of_a_selection_is_noticed_and_its_order_is_not() -> None:
    sample = OPERATORS["lightning_indexer"].small_sample()
    right, _ = sample.call(torch.ops.ascend)

    def differences(indices: Tensor) -> list[Any]:
        returned = Changing("ascend::lightning_indexer", lambda outputs: (indices, outputs[1]))
        with returned, ops.compare() as report:
            sample.call(torch.ops.ascend)
        return report.differences

    repeated = right.clone().flatten(0, -2)
    row = int((repeated >= 0).sum(-1).argmax())
    repeated[row, 0] = repeated[row, 1]
    assert differences(repeated.view(right.shape))
    assert not differences(right)


def test_calls_too_large_for_the_reference_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "MOST_OPERATIONS", 1000)
    with ops.compare() as report:
        attend()
    assert not report.compared
    assert report.skipped == {"flash_attention_score: more than 1e+03 operations": 1}
    assert "not compared: flash_attention_score: more than" in str(report)


@pytest.mark.parametrize("compiled_before", [False, True])
def test_a_compiled_function_is_compared_as_it_runs(compiled_before: bool) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda query: attend(query) * 2, backend="aot_eager", fullgraph=True)
    if compiled_before:
        compiled(QUERY)
    with ops.compare() as report:
        compiled(QUERY)
    assert report.compared == {"flash_attention_score": 1}

    def traced(query: Tensor) -> Tensor:
        with ops.compare():
            return attend(query)

    with pytest.raises(Exception, match="compile cannot trace this block" if SAYS_WHY else None):
        torch.compile(traced, backend="eager", fullgraph=True)(QUERY)


def test_nothing_is_done_outside_of_the_block() -> None:
    with ops.compare() as report:
        pass
    attend()
    assert not report.calls
    assert not report.compared
