"""The samples' own machinery, with a call whose arguments are lists of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from ascend_attn_ops.check.gradients import differentiable_names, gradients
from support.samples import OPERATORS, Gradient, Operator, Sample, named_tensors
from support.torch_defects import EXPORT_LOSES_STAR_ARGUMENTS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

NAME = "weighted_sum"


@pytest.fixture(scope="module")
def operator() -> Iterator[Operator]:
    """weighted_sum(Tensor[] weights, Tensor[] parts) -> Tensor: the sum of their products."""
    library = torch.library.Library("samples", "DEF")
    library.define(f"{NAME}(Tensor[] weights, Tensor[] parts, *, Tensor? bias=None) -> Tensor out")
    library.impl(NAME, weighted_sum, "CompositeImplicitAutograd")
    yield Operator(NAME, [Case()], build, Gradient(("weights", "parts"), ("out",)))
    library._destroy()


def weighted_sum(weights: list[Tensor], parts: list[Tensor], bias: Tensor | None = None) -> Tensor:
    total = sum(w[..., None] * x for w, x in zip(weights, parts, strict=True))
    assert isinstance(total, Tensor)
    return total if bias is None else total + bias


@dataclass(frozen=True)
class Case:
    parts: int = 3
    rows: int = 4

    @property
    def id(self) -> str:
        return f"{self.parts}x{self.rows}"


def build(case: Case, dtype: torch.dtype) -> Sample:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    inputs = {
        "weights": [random(case.rows) for _ in range(case.parts)],
        "parts": [random(case.rows, 5) for _ in range(case.parts)],
    }
    return Sample(NAME, case.id, inputs, {"bias": None})


@pytest.fixture
def sample() -> Sample:
    return build(Case(), torch.float32)


NAMES = [f"{name}[{i}]" for name in ("weights", "parts") for i in range(3)]


def expected(sample: Sample) -> Tensor:
    return weighted_sum(**sample.arguments)


def test_tensors_of_a_list_have_names(sample: Sample) -> None:
    assert list(sample.tensors) == NAMES
    assert sample.tensors["parts[1]"] is sample.inputs["parts"][1]
    assert sample.tensor_names(["parts"]) == ("parts[0]", "parts[1]", "parts[2]")
    assert sample.tensor_names(["weights[2]", "bias"]) == ("weights[2]",)
    # Lists of numbers are not among them.
    assert named_tensors({"lengths": [1, 2], "x": None, "y": torch.ones(1)}).keys() == {"y"}


def test_replace_changes_one_tensor_of_a_list_or_all(sample: Sample) -> None:
    zero = torch.zeros(4)
    changed = sample.replace(**{"weights[1]": zero})
    assert changed.tensors["weights[1]"] is zero
    assert changed.tensors["weights[0]"] is sample.tensors["weights[0]"]
    assert sample.tensors["weights[1]"] is not zero
    shorter = sample.replace(weights=[zero], parts=[torch.ones(4, 5)])
    assert list(shorter.tensors) == ["weights[0]", "parts[0]"]
    with pytest.raises(AssertionError, match="no scale"):
        sample.replace(scale=1.0)
    assert sample.given(scale=1.0).options == {"bias": None, "scale": 1.0}


def test_map_keeps_a_tensor_that_is_passed_twice(sample: Sample) -> None:
    x = sample.tensors["parts[0]"]
    twice = sample.replace(parts=[x, x, torch.ones(4, 5)]).clone()
    first, second, other = twice.inputs["parts"]
    assert first is second
    assert first is not x
    assert other is not first
    assert {x.dtype for x in sample.double().tensors.values()} == {torch.float64}
    assert {x.device.type for x in sample.to("meta").tensors.values()} == {"meta"}


def test_variants_in_memory_have_the_same_values(sample: Sample) -> None:
    for variant in (sample.strided(), sample.transposed()):
        assert not all(x.is_contiguous() for x in variant.tensors.values())
        torch.testing.assert_close(expected(variant), expected(sample), rtol=0, atol=0)


def test_leaves_are_the_tensors_that_are_asked_for(sample: Sample) -> None:
    def leaves(*names: str) -> list[str]:
        return [n for n, x in sample.requires_grad(names).tensors.items() if x.requires_grad]

    assert leaves("parts") == NAMES[3:]
    assert leaves("weights[1]", "bias") == ["weights[1]"]
    assert not leaves()


def test_calls(operator: Operator, sample: Sample) -> None:
    (out,) = sample.call(torch.ops.samples)
    assert torch.equal(out, expected(sample))
    assert sample.call(SimpleNamespace(weighted_sum=lambda *args, bias: None)) == ()
    with FakeTensorMode() as mode:
        (fake,) = sample.map(mode.from_tensor).call(torch.ops.samples)
    assert isinstance(fake, FakeTensor)
    assert fake.shape == out.shape


def test_gradients(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    record = SimpleNamespace(
        differentiable=operator.differentiable,
        gradient=operator.gradient,
        gradient_outputs=lambda outputs: outputs,
    )
    monkeypatch.setitem(OPERATORS, NAME, record)
    sample = operator.make(Case(), torch.float64)
    assert differentiable_names(sample) == tuple(NAMES)

    def call(leaf: Sample) -> tuple[Tensor, ...]:
        return leaf.call(torch.ops.samples)

    together = gradients(sample, call=call)
    assert [x.shape for x in together] == [x.shape for x in sample.tensors.values()]
    (alone,) = gradients(sample, ["parts[1]"], call=call)
    assert torch.equal(alone, together[4])
    leaf = sample.requires_grad(NAMES)

    def function(*leaves: Tensor) -> Tensor:
        return call(leaf.replace(**dict(zip(NAMES, leaves, strict=True))))[0]

    assert torch.autograd.gradcheck(function, tuple(leaf.tensors.values()))


def test_opcheck(operator: Operator, sample: Sample) -> None:
    torch.library.opcheck(
        torch.ops.samples.weighted_sum.default, sample.args, sample.options,
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )  # fmt: skip


@EXPORT_LOSES_STAR_ARGUMENTS
def test_export(operator: Operator, sample: Sample) -> None:
    class Module(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            call = sample.replace(**dict(zip(sample.tensors, tensors, strict=True)))
            return torch.ops.samples.weighted_sum(*call.args, **call.options)

    other = build(Case(rows=9), torch.float32)
    dynamic = tuple({0: torch.export.Dim.DYNAMIC} for _ in NAMES)
    program = torch.export.export(
        Module(), tuple(sample.tensors.values()), dynamic_shapes=(dynamic,), strict=False
    )
    out = program.module()(*other.tensors.values())
    torch.testing.assert_close(out, expected(other), rtol=0, atol=0)


def test_compiled(operator: Operator, sample: Sample) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args, **options: torch.ops.samples.weighted_sum(*args, **options),
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    with torch._dynamo.config.patch(error_on_recompile=True):
        for variant in (sample, build(Case(rows=9), torch.float32)):
            out = compiled(*variant.args, **variant.options)
            torch.testing.assert_close(out, expected(variant), rtol=0, atol=0)
