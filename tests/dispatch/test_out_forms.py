"""`out=` overloads write the operators' results to the caller's tensors, or nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations
from typing import Any

import ascend_attn_ops
import pytest
import torch
from support import registered
from support.freed import freed
from support.out_forms import FORMS, OUT_RECIPES, OutCall, fill, out_call, overload, rubbish_like
from support.samples import OPERATORS, WRONG_CALLS, Operator, Recipe, WrongCall, bytes_of
from support.turns import by_turns
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.usefixtures("no_limits")

each_form = pytest.mark.parametrize("operator", FORMS, ids=lambda operator: operator.name)
each_device = pytest.mark.parametrize("device", ["cpu", "meta"])


def good(operator: Operator, device: str = "cpu") -> OutCall:
    """A call whose outputs all have elements."""
    recipes = (recipe for recipe in OUT_RECIPES if recipe.operator is operator)
    calls = (out_call(recipe) for recipe in recipes)
    call = next(x for x in calls if all(output.numel() > 8 for output in x.outputs))
    return OutCall(operator, call.sample.to(device), tuple(x.to(device) for x in call.outputs))


def assert_refused(call: OutCall, kind: type[Exception], argument: str, expected: str) -> None:
    before = call.bytes()
    with pytest.raises(kind) as raised:
        call.run()
    assert raised.type is kind, raised.value
    form = rf"ascend::{call.operator.name}: {re.escape(argument)}: expected .+, got .+ \[ACLNN_.+\]"
    assert re.fullmatch(form, str(raised.value)), raised.value
    assert re.search(expected, str(raised.value)), raised.value
    assert all(torch.equal(x, y) for x, y in zip(call.bytes(), before, strict=True))


def names(call: OutCall) -> list[str]:
    return call.operator.output_names


def test_the_schema_is_the_operators_and_its_outputs() -> None:
    """No other operator has this overload."""
    forms = {name: found - {"", "list"} for name, found in registered.overloads().items()}
    assert {name: found for name, found in forms.items() if found} == {
        operator.name: {"out"} for operator in FORMS
    }
    for operator in FORMS:
        schema, functional = overload(operator)._schema, operator.overload._schema
        count = len(functional.arguments)
        for x, y in zip(schema.arguments[:count], functional.arguments, strict=True):
            assert (x.name, str(x.type), x.kwarg_only) == (y.name, str(y.type), y.kwarg_only)
            assert (x.has_default_value(), x.default_value, x.is_write) == (
                y.has_default_value(), y.default_value, False,
            )  # fmt: skip
        outputs = schema.arguments[count:]
        assert [x.name for x in outputs] == [x.name for x in functional.returns]
        assert all(x.kwarg_only and x.is_write and str(x.type) == "Tensor" for x in outputs)
        aliases = [x.alias_info.before_set for x in outputs]
        assert [x.alias_info.before_set for x in schema.returns] == aliases
        assert len({frozenset(x) for x in aliases}) == len(outputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@by_turns(8)
@pytest.mark.parametrize("recipe", OUT_RECIPES, ids=lambda recipe: recipe.id)
def test_the_bytes_are_those_of_the_operator(recipe: Recipe, dtype: torch.dtype) -> None:
    call = out_call(recipe, dtype)
    addresses = [x.data_ptr() for x in call.outputs]
    inputs = {name: bytes_of(x).clone() for name, x in call.sample.tensors.items()}
    written = call.run()
    for x, y, expected in zip(
        written, call.outputs, call.sample.call(torch.ops.ascend), strict=True
    ):
        assert x is y
        assert torch.equal(bytes_of(x), bytes_of(expected))
    assert [x.data_ptr() for x in call.outputs] == addresses
    for name, x in call.sample.tensors.items():
        assert torch.equal(bytes_of(x), inputs[name]), name


def allocations(function: Callable[[], Any]) -> tuple[int, int]:
    """How many tensors torch allocates in a call, and their bytes."""
    function()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = function()
    del kept
    events = seen.events() or []
    count = sum(event.name.startswith("aten::empty") for event in events)
    return count, sum(max(event.self_cpu_memory_usage, 0) for event in events)


@each_device
@each_form
def test_no_output_is_allocated(operator: Operator, device: str) -> None:
    call = good(operator, device)
    count, size = allocations(lambda: call.sample.call(torch.ops.ascend))
    count_out, size_out = allocations(call.run)
    assert count - count_out == len(call.outputs)
    if device == "meta":
        assert count_out == 0
    else:
        assert size - size_out >= sum(x.nbytes for x in call.outputs)


@each_device
@each_form
def test_wrong_outputs(operator: Operator, device: str) -> None:
    call = good(operator, device)
    for index, (name, x) in enumerate(zip(names(call), call.outputs, strict=True)):
        shape = re.escape(str(list(x.shape)))
        other = torch.float64 if x.dtype == torch.int32 else torch.int32
        elsewhere = torch.empty_like(x, device="cpu" if device == "meta" else "meta")
        gaps = torch.stack((x, x), -1)[..., 0]
        error = "expected a storage that holds every element, got one of 0 bytes"
        without_memory = [(freed(x), ValueError, error)] if device == "cpu" else []
        null = r"expected a tensor, got None \[ACLNN_ERR_PARAM_NULLPTR 161001\]"
        for output, kind, expected in (
            (x.to(other), TypeError, "expected dtype .*, got (float64|int32)"),
            (elsewhere, ValueError, f"expected device {device}, got {elsewhere.device}"),
            (x[None], ValueError, rf"expected shape {shape}, got \[1, "),
            (x.flatten()[1:], ValueError, rf"expected shape {shape}, got \[\d+\]"),
            (x.new_empty(0), ValueError, rf"expected shape {shape}, got \[0\]"),
            (gaps, ValueError, "expected a contiguous tensor, got strides"),
            (None, ValueError, null),
            *without_memory,
        ):
            assert_refused(call.with_output(index, output), kind, name, expected)
    call.run()


@each_device
def test_an_output_that_a_call_leaves_empty(device: str) -> None:
    """It has no elements; the tensor for it neither."""
    call = good(OPERATORS["fused_infer_attention_score"], device)
    call = OutCall(call.operator, call.sample.given(return_softmax_lse=False), call.outputs)
    assert_refused(call, ValueError, "softmax_lse", r"expected shape \[0\], got")
    call = call.with_output(1, call.outputs[1].new_empty(0))
    call.run()
    if device == "cpu":
        assert torch.equal(call.outputs[0], call.sample.call(torch.ops.ascend)[0])


def in_one_buffer(first: Tensor, second: Tensor, apart: bool) -> tuple[Tensor, Tensor]:
    """Returns copies in one buffer: the second begins behind the first, or on its last byte."""
    step = 8  # of addresses, which suits every dtype
    end = first.nbytes - (0 if apart else 1)
    at = -(-end // step) * step if apart else end // step * step
    storage = torch.UntypedStorage(at + max(second.nbytes, step), device=first.device)
    copies = []
    for x, offset in ((first, 0), (second, at)):
        copy = torch.empty(0, dtype=x.dtype, device=x.device)
        copy.set_(storage, offset // x.itemsize, x.shape)
        copies.append(copy)
    if not first.is_meta:
        # The input last, for it needs its values.
        fill(copies[1])
        copies[0].copy_(first)
    return copies[0], copies[1]


@each_device
@each_form
def test_overlaps(operator: Operator, device: str) -> None:
    """Every output against every tensor that is read, and against every other output."""
    for call in with_every_tensor(operator, device):
        checked = 0
        for name, read in call.sample.tensors.items():
            if read.numel() == 0 or read.device.type != device:
                continue
            for index, output in with_elements(call):
                x, y = in_one_buffer(read.contiguous(), output, apart=False)
                wrong = call.with_inputs(**{name: x}).with_output(index, y)
                message = re.escape(f"expected memory of its own, got some of {name}'s")
                assert_refused(wrong, ValueError, names(call)[index], message)
                x, y = in_one_buffer(read.contiguous(), output, apart=True)
                right = call.with_inputs(**{name: x}).with_output(index, y)
                assert_writes(right, call)
                checked += 1
        assert checked
        for (other, first), (index, output) in combinations(with_elements(call), 2):
            x, y = in_one_buffer(first, output, apart=False)
            wrong = call.with_output(other, x).with_output(index, y)
            message = f"expected memory of its own, got some of {names(call)[other]}'s"
            assert_refused(wrong, ValueError, names(call)[index], message)
            x, y = in_one_buffer(first, output, apart=True)
            assert_writes(call.with_output(other, x).with_output(index, y), call)


def with_elements(call: OutCall) -> list[tuple[int, Tensor]]:
    """The outputs that can overlap something."""
    return [(index, x) for index, x in enumerate(call.outputs) if x.numel()]


def with_every_tensor(operator: Operator, device: str) -> list[OutCall]:
    """Calls which, together, have every tensor that an operator reads."""
    calls: list[OutCall] = []
    missing = {x.name for x in operator.overload._schema.arguments if "Tensor" in str(x.type)}
    for recipe in OUT_RECIPES:
        if recipe.operator is not operator or not missing:
            continue
        sample = recipe.make(torch.bfloat16)
        found = {name.partition("[")[0] for name, x in sample.tensors.items() if x.numel()}
        outputs = sample.call(torch.ops.ascend)
        if found & missing and outputs[0].numel():
            missing -= found
            calls.append(out_call(recipe, device=device))
    assert not missing
    return calls


def assert_writes(call: OutCall, like: OutCall) -> None:
    """Asserts that the call writes the results of `like`."""
    written = call.run()
    if not written[0].is_meta:
        for x, y in zip(written, like.sample.call(torch.ops.ascend), strict=True):
            assert torch.equal(bytes_of(x), bytes_of(y))


@by_turns(4)
@pytest.mark.parametrize(
    "row", [row for row in WRONG_CALLS if row.operator in FORMS],
    ids=lambda row: f"{row.operator.name}-{row.id}",
)  # fmt: skip
def test_a_wrong_call_writes_nothing(row: WrongCall) -> None:
    """Its arguments are refused as the operator refuses them."""
    with ascend_attn_ops.limits(row.limits_of_good):
        outputs = rubbish_like(row.good().call(torch.ops.ascend))
    call = OutCall(row.operator, row.wrong(), outputs)
    before = call.bytes()
    with ascend_attn_ops.limits(row.limits), pytest.raises(row.exception) as raised:
        call.run()
    row.check_message(str(raised.value))
    assert all(torch.equal(x, y) for x, y in zip(call.bytes(), before, strict=True))


@each_form
def test_tensors_that_require_grad(operator: Operator) -> None:
    call = good(operator)
    differentiable = operator.differentiable or ("query", "key", "value")
    tensors = call.sample.tensors
    for name in call.sample.tensor_names(differentiable):
        if not tensors[name].is_floating_point():
            continue
        wrong = OutCall(operator, call.sample.requires_grad([name]), call.outputs)
        argument = name.partition("[")[0]
        assert_refused(
            wrong, NotImplementedError, argument, "without gradient.*got one that requires"
        )
        with torch.no_grad():
            assert_writes(wrong, call)
    for index, output in enumerate(call.outputs):
        if not output.is_floating_point():
            continue
        leaf = output.clone().requires_grad_()
        wrong = call.with_output(index, leaf)
        expected = "without gradient.*got one that requires"
        assert_refused(wrong, NotImplementedError, names(call)[index], expected)
        with torch.no_grad():
            assert_writes(wrong, call)


@each_form
def test_autograd_knows_of_the_write(operator: Operator) -> None:
    call = good(operator)
    versions = [x._version for x in call.outputs]
    call.run()
    assert [x._version for x in call.outputs] == [x + 1 for x in versions]
    with torch.inference_mode():
        call.run()
    assert [x._version for x in call.outputs] == [x + 2 for x in versions]
    if call.outputs[0].is_floating_point():
        factor = torch.ones_like(call.outputs[0], requires_grad=True)
        product = (factor * call.outputs[0]).sum()
        call.run()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@each_form
def test_tensors_of_inference_mode(operator: Operator) -> None:
    call = good(operator)
    with torch.inference_mode():
        outputs, sample = rubbish_like(call.outputs), call.sample.clone()
    # With inputs of both kinds: without any tensor of autograd its check does not run.
    for inputs in (call.sample, sample):
        inside = OutCall(operator, inputs, outputs)
        assert_refused(inside, ValueError, names(call)[0], "got one made in inference mode")
        with torch.inference_mode():
            assert_writes(inside, call)
            for x in outputs:
                fill(x)
    assert_writes(OutCall(operator, sample, call.outputs), call)


@each_form
def test_negated_views(operator: Operator) -> None:
    def negated(x: Tensor) -> Tensor:
        """A view of other memory, which shows the same values."""
        return torch._neg_view(-x) if x.is_floating_point() else x

    call = good(operator)
    assert_writes(OutCall(operator, call.sample.map(negated), call.outputs), call)
    for index, x in enumerate(call.outputs):
        if x.is_floating_point():
            wrong, expected = call.with_output(index, torch._neg_view(x)), "that negates them"
            assert_refused(wrong, ValueError, names(call)[index], expected)


@each_form
def test_autocast_casts_nothing(operator: Operator) -> None:
    """The caller's tensors have a dtype: what disagrees with it is an error."""
    recipe = next(x for x in OUT_RECIPES if x.operator is operator)
    call = out_call(recipe, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        written = call.run()
    for x, y in zip(written, call.sample.call(torch.ops.ascend), strict=True):
        assert torch.equal(bytes_of(x), bytes_of(y))
    floats = [i for i, x in enumerate(call.outputs) if x.is_floating_point() and x.numel()]
    for index in floats:
        wrong = call.with_output(index, call.outputs[index].bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            assert_refused(wrong, TypeError, names(call)[index], "expected dtype float32")
