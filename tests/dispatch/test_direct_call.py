"""Public functions reach the dispatcher without torch.ops: a clock can tell the difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ascend_attn_ops
import pytest
import torch
from ascend_attn_check.gradients import gradients
from ascend_attn_ops import _C
from ascend_attn_ops.reference.call import lengths
from fuzz.copies import twin
from support.samples import OPERATORS, RECIPES, Operator, Recipe, Sample, as_tuple, bytes_of
from support.tolerance import assert_same_bits
from support.turns import by_turns
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

np = pytest.importorskip("numpy", reason="numpy is not installed")

pytestmark = pytest.mark.usefixtures("no_limits")

ATTENTION = OPERATORS["sparse_flash_attention"]
SCATTER = "scatter_pa_kv_cache_"

each_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda x: x.name)


def values(sample: Sample) -> list[Any]:
    """Every argument of the schema, in its order."""
    given = sample.arguments
    return [
        given.get(argument.name, argument.default_value)
        for argument in OPERATORS[sample.operator].overload._schema.arguments
    ]


def direct(operator: str) -> Callable[..., Any]:
    """Where it is left to torch.ops, NotImplemented."""
    return _C.direct_calls[operator](lambda *arguments: NotImplemented, __name__)


def is_left_to_torch(operator: str, arguments: list[Any]) -> bool:
    return direct(operator)(*arguments) is NotImplemented


@by_turns(8)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.id)
def test_results_are_those_of_torch_ops(recipe: Recipe) -> None:
    sample = recipe.make(torch.bfloat16)
    results = direct(sample.operator)(*values(sample))
    assert type(results) is type(recipe.operator.overload(*sample.args, **sample.options))
    assert_same_bits(as_tuple(results), sample.call(torch.ops.ascend))


@pytest.mark.parametrize(
    "operator", [x for x in OPERATORS.values() if x.gradient], ids=lambda x: x.name
)
def test_gradients_are_those_of_torch_ops(operator: Operator) -> None:
    sample = operator.small_sample()
    ours = gradients(sample, call=lambda leaves: direct(operator.name)(*values(leaves)))
    assert_same_bits(ours, gradients(sample))


class Received(TorchFunctionMode):
    """The arguments of the operator, by name; it does not run."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> None:
        names = [argument.name for argument in func._schema.arguments]
        self.arguments = {**dict(zip(names, args, strict=False)), **(kwargs or {})}


@each_operator
def test_public_functions_pass_every_argument_in_its_place(operator: Operator) -> None:
    # Anything will do but for lengths, which the function makes tensors of.
    given = {
        name: lengths([1]) if name.startswith(("actual_seq", "prefix")) else object()
        for name in (argument.name for argument in operator.overload._schema.arguments)
    }
    with Received() as mode:
        getattr(ascend_attn_ops, operator.name)(**given)
    assert mode.arguments == given


@each_operator
def test_an_iterator_is_read_once(operator: Operator) -> None:
    """It gives what its list gives; lengths of sequences must be a list."""
    samples = [recipe.make(torch.float32) for recipe in operator.recipes]
    of_argument = {
        name: sample
        for sample in reversed(samples)
        for name, given in sample.arguments.items()
        if isinstance(given, list | tuple) and given
    }
    for name, sample in of_argument.items():
        given = sample.arguments[name]

        def call(x: Any, name: str = name, sample: Sample = sample) -> list[Tensor]:
            copies = twin({**sample.arguments, name: x})
            outputs = as_tuple(getattr(ascend_attn_ops, operator.name)(**copies))
            caches = (copies.get(cache) for cache in ("key_cache", "value_cache"))
            return [*outputs, *(bytes_of(cache) for cache in caches if cache is not None)]

        for iterator in (iter(given), (x for x in given)):
            if name.startswith("actual_seq_lengths"):
                with pytest.raises(
                    TypeError, match=rf": {name}: expected whole numbers, as a list"
                ):
                    call(iterator)
            else:
                assert_same_bits(call(iterator), call(given))


@each_operator
def test_every_wrong_type_is_left_to_torch_ops(operator: Operator) -> None:
    """Which has an error for it, or a conversion."""
    arguments = values(operator.small_sample())
    types = [str(a.type) for a in operator.overload._schema.arguments]
    wrong: dict[str, list[Any]] = {
        "Tensor": [None, 1, "a", np.zeros(3)], "Optional[Tensor]": [1, "a", np.zeros(3)],
        "List[Tensor]": [None, 1, "a", [None], [1], torch.ones(2)],
        "int": [None, 1.0, True, "1", np.int64(1), 2**63, -(2**63) - 1],
        "Optional[int]": [1.0, True, "1", np.int64(1), 2**63],
        "float": [None, 1, True, "1.0", np.float64(1.0)],
        "Optional[float]": [1, True, "1.0", np.float64(1.0)],
        "bool": [None, 0, 1, "True", np.True_], "str": [None, b"Norm", 1, "\ud800"],
        "Optional[str]": [b"TND", 1, "\ud800"],
        "List[int]": [None, 1, [1.0, 1.0], [True, True], "11", [2**63, 1]],
        "Optional[List[int]]": [1, [1.0], [None], torch.ones(1, dtype=torch.int64), "1"],
    }  # fmt: skip
    for position, name in enumerate(types):
        for value in wrong[name]:
            changed = [*arguments[:position], value, *arguments[position + 1 :]]
            assert is_left_to_torch(operator.name, changed), f"argument {position}: {value!r}"
    assert is_left_to_torch(operator.name, arguments[:-1])
    assert is_left_to_torch(operator.name, [*arguments, None])
    assert is_left_to_torch(operator.name, [])


def test_conversions_of_torch_ops_stay() -> None:
    """An integer for a float, numpy's numbers."""
    sample = ATTENTION.small_sample().replace(scale_value=1.0)
    expected = sample.call(torch.ops.ascend)
    for scale in (1, np.float32(1.0), np.float64(1.0), torch.tensor(1.0)):
        assert_same_bits(sample.replace(scale_value=scale).call(ascend_attn_ops), expected)


class Recording:
    """A dispatch mode that records the operator and runs it, of either kind."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def record(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


class Seen(Recording, TorchFunctionMode):
    __torch_function__ = Recording.record


class Dispatched(Recording, TorchDispatchMode):
    __torch_dispatch__ = Recording.record


@each_operator
def test_modes_see_the_operator(operator: Operator) -> None:
    sample = operator.small_sample()
    for mode in (Seen(), Dispatched()):
        with mode:
            sample.call(ascend_attn_ops)
        assert operator.overload in mode.operators


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return None


@pytest.mark.parametrize("namespace", [torch.ops.ascend, ascend_attn_ops])
def test_a_mode_that_returns_something_else(namespace: Any) -> None:
    sample = ATTENTION.small_sample()
    with Nothing(), pytest.raises(TypeError, match="sequence"):
        sample.call(namespace)


def test_subclasses_are_asked() -> None:
    class Asked(Tensor):
        operators: list[Any] = []  # noqa: RUF012

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            cls.operators.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    sample = ATTENTION.small_sample()
    subclass = sample.replace(query=sample.inputs["query"].as_subclass(Asked))
    assert_same_bits(subclass.call(ascend_attn_ops), sample.call(torch.ops.ascend))
    assert ATTENTION.overload in Asked.operators
