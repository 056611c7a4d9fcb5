"""`out=` overloads under torch.compile, torch.export and functionalization."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.out_forms import FORMS, OUT_RECIPES, OutCall, fill, out_call, overload, rubbish_like
from support.samples import Operator, Recipe, Sample, as_tuple, bytes_of, resized
from support.torch_defects import skip_unless_dynamo_traces_out
from support.turns import first_of_each, nightly
from torch import Tensor

pytestmark = [pytest.mark.usefixtures("no_limits"), pytest.mark.smoke]

each_layout = pytest.mark.parametrize(
    "recipe",
    first_of_each(OUT_RECIPES, lambda x: (x.operator.name, x.layout), lambda x: x.operator.name),
)
each_first = pytest.mark.parametrize(
    "recipe", [x.recipes[0] for x in FORMS], ids=lambda recipe: recipe.id
)


def write(operator: Operator, sample: Sample, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return OutCall(operator, sample, outputs).run()


def assert_same_bytes(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(bytes_of(x), bytes_of(y))


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=nightly), True])
@each_layout
def test_aot_eager(recipe: Recipe, dynamic: bool) -> None:
    check_compiled(recipe, "aot_eager", dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@each_first
def test_inductor(recipe: Recipe, dynamic: bool) -> None:
    check_compiled(recipe, "inductor", dynamic)


def check_compiled(recipe: Recipe, backend: str, dynamic: bool) -> None:
    """The caller's tensors are written to, and what reads them later reads the results."""
    form = overload(recipe.operator)
    names = recipe.operator.output_names
    skip_unless_dynamo_traces_out(names)

    def function(args: Any, options: Any, outputs: Any) -> Any:
        before = [x + 1 for x in outputs]
        written = form(*args, **options, **dict(zip(names, outputs, strict=True)))
        return before, [x + 1 for x in as_tuple(written)], [x + 2 for x in outputs]

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=dynamic):
        for variant in (recipe, resized(recipe)) if dynamic else (recipe,):
            sample = variant.make(torch.bfloat16)
            expected = sample.call(torch.ops.ascend)
            rubbish = rubbish_like(expected)
            outputs = rubbish_like(expected)
            addresses = [x.data_ptr() for x in outputs]
            before, written, after = compiled(sample.args, sample.options, outputs)
            assert_same_bytes(outputs, expected)
            assert [x.data_ptr() for x in outputs] == addresses
            assert_same_bytes(before, tuple(x + 1 for x in rubbish))
            assert_same_bytes(written, tuple(x + 1 for x in expected))
            assert_same_bytes(after, tuple(x + 2 for x in expected))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=nightly)])
@pytest.mark.parametrize("operator", FORMS, ids=lambda operator: operator.name)
def test_outputs_made_in_the_graph(operator: Operator, backend: str) -> None:
    """And parts of a larger tensor, whose other elements stay."""
    call = out_call(next(x for x in OUT_RECIPES if x.operator is operator))
    names = operator.output_names
    skip_unless_dynamo_traces_out(names)

    def function(args: Any, options: Any, buffers: Any) -> Any:
        made = [torch.empty_like(x[0]) for x in buffers]
        first = overload(operator)(*args, **options, **dict(zip(names, made, strict=True)))
        parts = [x[1] for x in buffers]
        overload(operator)(*args, **options, **dict(zip(names, parts, strict=True)))
        return as_tuple(first)

    expected = call.sample.call(torch.ops.ascend)
    buffers = [fill(x.new_empty(3, *x.shape)) for x in expected]
    rubbish = [x.clone() for x in buffers]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    first = compiled(call.sample.args, call.sample.options, buffers)
    assert_same_bytes(first, expected)
    for buffer, before, result in zip(buffers, rubbish, expected, strict=True):
        assert_same_bytes((buffer[0], buffer[1], buffer[2]), (before[0], result, before[2]))


def test_an_input_as_output_does_not_compile() -> None:
    torch._dynamo.reset()
    query, key, value = torch.randn(3, 1, 2, 8, 16, dtype=torch.bfloat16)

    def function() -> Any:
        return torch.ops.ascend.prompt_flash_attention.out(
            query, key, value, layout="BNSD", out=value
        )

    for dynamic in (False, True):
        before = value.clone()
        with pytest.raises(RuntimeError, match="got some of value's"):
            torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)()
        assert torch.equal(value, before)


@each_first
def test_export(recipe: Recipe) -> None:
    call = out_call(recipe)
    inputs = call.sample.tensors

    class Module(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
            sample = call.sample.replace(**dict(zip(inputs, tensors, strict=False)))
            outputs = tensors[len(inputs) :]
            write(call.operator, sample, outputs)
            return tuple(x + 1 for x in outputs)

    program = torch.export.export(Module(), (*inputs.values(), *call.outputs), strict=False)
    program = program.run_decompositions({})
    outputs = rubbish_like(call.outputs)
    after = program.module()(*inputs.values(), *outputs)
    expected = call.sample.call(torch.ops.ascend)
    assert_same_bytes(outputs, expected)
    assert_same_bytes(after, tuple(x + 1 for x in expected))


@each_layout
def test_opcheck(recipe: Recipe) -> None:
    call = out_call(recipe, torch.float32)
    given = dict(zip(call.operator.output_names, call.outputs, strict=True))
    torch.library.opcheck(
        overload(call.operator), call.sample.args, {**call.sample.options, **given}
    )
