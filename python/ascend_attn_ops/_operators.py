"""The public function of an operator, made from its declaration.

Matching arguments with a schema takes torch.ops longer than a small operator runs. The public
functions therefore pass every argument, in the order of the schema, straight to the dispatcher
(csrc/python/direct_call.h), which leaves calls with anything but plain tensors and numbers to
torch.ops. What torch.compile traces goes through torch.ops as well.
"""

from __future__ import annotations

import functools
import inspect
import linecache
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.compiler import is_dynamo_compiling

from ascend_attn_ops import _C

# pre_tokens and next_tokens that bound nothing, as CANN's dense and sparse functions expect them.
ALL_TOKENS = 2**31 - 1
ALL_TOKENS_SPARSE = 2**63 - 1

# Annotations for the types of a schema.
_ANNOTATIONS = {
    "Tensor": "Tensor",
    "Optional[Tensor]": "Tensor | None",
    "List[Tensor]": "Sequence[Tensor]",
    "int": "int",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "List[int]": "Sequence[int]",
    "Optional[List[int]]": "Sequence[int] | None",
}

P = ParamSpec("P")
R = TypeVar("R")


def operator(**computed: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Turn a declaration (signature and docstring, no body) into the operator of its name.

    Each argument of the schema is the parameter of its name. `computed` has functions of parameters
    for some of them, called in their order: one that reads the argument itself gives its value, any
    other gives the value of an argument that is None. ``*tensors`` and ``**options`` in a
    declaration stand for all arguments of the schema that it does not list.
    """

    def make(declaration: Callable[P, R]) -> Callable[P, R]:
        name, module = declaration.__name__, declaration.__module__
        schema = schema_parameters(name)
        signature = _with_options(inspect.signature(declaration), schema)
        through_torch = _through_torch(name, schema)
        names = {
            "_direct": _C.direct_calls[name](through_torch, module),
            "_through_torch": through_torch,
            "_is_dynamo_compiling": is_dynamo_compiling,
            **{f"_{argument}": function for argument, function in computed.items()},
        }
        body = [_assignment(argument, function) for argument, function in computed.items()]
        body += [
            "call = _through_torch if _is_dynamo_compiling() else _direct",
            f"return call({', '.join(schema)})",
        ]
        function = _function(declaration, signature, names, body)
        return cast("Callable[P, R]", function)

    return make


def schema_parameters(name: str) -> dict[str, inspect.Parameter]:
    """The arguments of an operator, as torch.ops takes them."""
    kinds = {
        False: inspect.Parameter.POSITIONAL_OR_KEYWORD,
        True: inspect.Parameter.KEYWORD_ONLY,
    }
    return {
        x.name: inspect.Parameter(
            x.name,
            kinds[x.kwarg_only],
            default=x.default_value if x.has_default_value() else inspect.Parameter.empty,
            annotation=_ANNOTATIONS[str(x.type)],
        )
        for x in getattr(torch.ops.ascend, name).default._schema.arguments
    }


def _with_options(
    signature: inspect.Signature, schema: dict[str, inspect.Parameter]
) -> inspect.Signature:
    listed = dict(signature.parameters)
    listed.pop("tensors", None)
    if listed.pop("options", None):
        listed |= {name: schema[name] for name in schema if name not in listed}
    return signature.replace(parameters=list(listed.values()))


def _assignment(argument: str, compute: Callable[..., Any]) -> str:
    read = inspect.signature(compute).parameters
    call = f"_{argument}({', '.join(read)})"
    return f"{argument} = " + (
        call if argument in read else f"{call} if {argument} is None else {argument}"
    )


def _through_torch(name: str, schema: dict[str, inspect.Parameter]) -> Callable[..., Any]:
    overload = getattr(torch.ops.ascend, name).default
    keywords = [x.name for x in schema.values() if x.kind is inspect.Parameter.KEYWORD_ONLY]
    positional = len(schema) - len(keywords)

    def call(*values: Any) -> Any:
        keyword_values = dict(zip(keywords, values[positional:], strict=True))
        return overload(*values[:positional], **keyword_values)

    return call


def _function(
    declaration: Callable[..., Any],
    signature: inspect.Signature,
    names: dict[str, Any],
    body: list[str],
) -> Callable[..., Any]:
    """Generate the function, as dataclasses generates __init__: it has the parameters of
    `signature`, and its body sees `names`."""
    name = declaration.__name__
    parameters = signature.parameters.values()
    bare = [x.replace(default=x.empty, annotation=x.empty) for x in parameters]
    source = (
        f"def make({', '.join(names)}):\n"
        f"    def {name}{inspect.Signature(bare)}:\n"
        + "".join(f"        {statement}\n" for statement in body)
        + f"    return {name}\n"
    )
    # For tracebacks.
    file = f"<{declaration.__module__}.{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {}
    exec(compile(source, file, "exec"), declaration.__globals__, namespace)
    function = namespace["make"](**names)
    functools.update_wrapper(function, declaration)
    function.__signature__ = signature
    function.__annotations__ = {
        **{x.name: x.annotation for x in parameters},
        "return": signature.return_annotation,
    }
    with_default = [x for x in parameters if x.default is not x.empty]
    function.__kwdefaults__ = {x.name: x.default for x in with_default if x.kind is x.KEYWORD_ONLY}
    positional = [x.default for x in with_default if x.kind is not x.KEYWORD_ONLY]
    function.__defaults__ = tuple(positional) or None
    return cast("Callable[..., Any]", function)
