"""Schema, struct and Python function of an operator have the same arguments, by name."""

from __future__ import annotations

import inspect
import pkgutil
import re
from typing import Any, get_type_hints

import ascend_attn_ops
import pytest
import torch
from ascend_attn_ops import _C, reference
from ascend_attn_ops.reference import REFERENCES
from support import registered
from support.checkout import ROOT

HEADERS = ROOT / "csrc" / "ops"
STRUCT = re.compile(r"^struct (\w+)(?: : (\w+))? \{(.*?)^\};", re.DOTALL | re.MULTILINE)
NAME = re.compile(r'static constexpr const char\* name = "(\w+)"')
FIELDS = re.compile(r"([\w:<>&, ]+?)\s+(\w+(?:,\s*\w+)*)")

PUBLIC = sorted(_C.direct_calls)

# Arguments with a default in torch.ops, which the public function chooses by the others.
CHOSEN = {("sparse_flash_attention", "return_softmax_lse")}


class Structs:
    """The structs of the headers in csrc/ops."""

    def __init__(self) -> None:
        text = "\n".join(path.read_text() for path in sorted(HEADERS.glob("*.h")))
        self.found = {
            name: (base, body) for name, base, body in STRUCT.findall(re.sub(r"//.*", "", text))
        }

    def fields(self, struct: str) -> list[str]:
        """Without what is static; a field that is a struct itself stands for its fields."""
        base, body = self.found[struct]
        names = self.fields(base) if base else []
        for statement in (part.strip() for part in body.split(";")):
            field = FIELDS.fullmatch(statement)
            if field is None or statement.startswith(("static ", "using ")):
                continue
            kind, listed = field.groups()
            names += self.fields(kind) if kind in self.found else re.split(r",\s*", listed)
        return names

    def operators(self) -> dict[str, list[str]]:
        """The fields of every struct that has an operator's name."""
        named = {struct: NAME.search(body) for struct, (_, body) in self.found.items()}
        return {name[1]: self.fields(struct) for struct, name in named.items() if name}


STRUCTS = Structs().operators()


def arguments(operator: str) -> list[Any]:
    return getattr(torch.ops.ascend, operator).default._schema.arguments


def test_every_operator_has_a_struct_a_function_and_a_reference() -> None:
    assert STRUCTS.keys() == registered.OPERATORS
    public = {name for name in registered.OPERATORS if not name.startswith("_")}
    assert public == _C.direct_calls.keys()
    assert public == {name for name in REFERENCES if not name.startswith("_")}
    assert public == {row["operator"] for row in _C.limits_table()}


@pytest.mark.parametrize("operator", sorted(STRUCTS))
def test_the_struct_has_the_arguments_of_the_schema(operator: str) -> None:
    # KeyPages is a part of operators whose layout of the keys has the name that CANN gives it.
    of_keys = "key_layout" in STRUCTS[operator]
    names = [argument.name for argument in arguments(operator)]
    names = [
        "key_layout" if of_keys and name in ("layout_key", "layout_kv") else name for name in names
    ]
    assert STRUCTS[operator] == names


@pytest.mark.parametrize("operator", PUBLIC)
def test_the_function_has_the_arguments_of_the_schema(operator: str) -> None:
    parameters = inspect.signature(getattr(ascend_attn_ops, operator)).parameters
    schema = {argument.name: argument for argument in arguments(operator)}
    positional = [argument.name for argument in arguments(operator) if not argument.kwarg_only]
    assert list(parameters)[: len(positional)] == positional
    assert schema.keys() <= parameters.keys()
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue  # which the function refuses
        keyword_only = schema[name].kwarg_only if name in schema else True
        assert (parameter.kind is parameter.KEYWORD_ONLY) == keyword_only, name


@pytest.mark.parametrize("operator", PUBLIC)
def test_the_function_has_the_defaults_of_the_schema(operator: str) -> None:
    parameters = inspect.signature(getattr(ascend_attn_ops, operator)).parameters
    for argument in arguments(operator):
        name, default = argument.name, parameters[argument.name].default
        if (operator, name) in CHOSEN:
            assert default is None
        elif argument.has_default_value():
            expected = argument.default_value
            given = list(default) if isinstance(default, tuple) else default
            assert (type(given), given) == (type(expected), expected), name
        else:
            # A number that torch.ops requires, and that the function computes where it is None.
            computed = str(argument.type) == "float" and default is None
            assert default is inspect.Parameter.empty or computed, name


@pytest.mark.parametrize("operator", PUBLIC)
def test_the_function_is_plain_python(operator: str) -> None:
    function = getattr(ascend_attn_ops, operator)
    assert inspect.isfunction(function)
    assert not hasattr(function, "__wrapped__")
    assert function.__doc__
    assert function.__qualname__ == operator
    assert inspect.getsource(function).startswith(f"def {operator}(")
    assert get_type_hints(function).keys() == {*inspect.signature(function).parameters, "return"}


def test_the_loss_takes_the_arguments_of_its_operator() -> None:
    loss, operator = (
        {
            name: (parameter.kind, parameter.default)
            for name, parameter in inspect.signature(
                getattr(ascend_attn_ops, name)
            ).parameters.items()
        }
        for name in ("lightning_indexer_kl_loss", "sparse_lightning_indexer_grad_kl_loss")
    )
    assert loss.pop("reduction")[1] == "sum"
    assert loss.pop("normalizer")[1] is None
    # A target stands in place of the attention.
    for name, default in (
        ("target", None), ("normalize_target", False), ("cmp_ratio", 1), ("cmp_residual_key", None)
    ):  # fmt: skip
        assert loss.pop(name)[1] == default
    for name in ("softmax_max", "softmax_sum", "scale_value"):
        kind, default = loss.pop(name)
        assert (kind, default) == (operator.pop(name)[0], None)
    # The mode ignores both.
    del operator["pre_tokens"], operator["next_tokens"]
    assert loss == operator


def test_no_module_hides_a_public_function() -> None:
    """Importing a submodule sets an attribute of its package."""
    modules = {x.name for x in pkgutil.iter_modules(ascend_attn_ops.__path__)}
    assert not modules & {name.rstrip("_") for name in ascend_attn_ops.__all__}
    assert not {x.name for x in pkgutil.iter_modules(reference.__path__)} & REFERENCES.keys()
