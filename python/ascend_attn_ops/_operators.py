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
import re
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from operator import index
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ascend_attn_ops import _C
from ascend_attn_ops._arguments import check_memory, shown, tensors_in, whole, wrong
from ascend_attn_ops._npu_graphs import captures

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
    "Optional[str]": "str | None",
    "List[int]": "Sequence[int]",
    "Optional[List[int]]": "Sequence[int] | None",
}

# What torch.ops says of an argument that has another type than the schema, in its first line.
_WRONG_TYPE = re.compile(r"Expected a value of type '.*' for argument '(\w+)'")
_EXPECTED = {
    "Tensor": "a tensor",
    "Optional[Tensor]": "a tensor or None",
    "List[Tensor]": "a list of tensors",
    "int": "a whole number of 64 bits",
    "float": "a number",
    "bool": "a bool",
    "str": "a string",
    "Optional[str]": "a string or None",
    "List[int]": "a list of whole numbers of 64 bits",
    "Optional[List[int]]": "a list of whole numbers of 64 bits or None",
}

# The public functions take sequence lengths as a tensor or as a list, whatever the schema wants.
_LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")
Lengths = Tensor | Sequence[int] | None
# The function and the argument that an error names.
Where = tuple[str, str]
_LENGTHS_OF_NONE = ("ascend", "lengths")  # those that a function has read before

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
            annotation="Lengths" if x.name in _LENGTHS else _ANNOTATIONS[str(x.type)],
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
    types = {x.name: str(x.type) for x in overload._schema.arguments}
    convert = lengths_on if types.get(_LENGTHS[0]) == "Optional[Tensor]" else lengths_of
    lengths = [
        (position, (f"ascend::{name}", argument))
        for position, argument in enumerate(schema)
        if argument in _LENGTHS
    ]
    tensor_types = ("Tensor", "Optional[Tensor]")
    keywords = [x.name for x in schema.values() if x.kind is inspect.Parameter.KEYWORD_ONLY]
    positional = len(schema) - len(keywords)

    # The direct call comes here with what is not plain, as lengths in the other form are.
    def call(*given: Any) -> Any:
        values = list(given)
        for position, where in lengths:
            values[position] = convert(values[position], values[0], where)
        keyword_values = dict(zip(keywords, values[positional:], strict=True))
        if is_dynamo_compiling():
            return overload(*values[:positional], **keyword_values)
        for argument, x in zip(schema, values, strict=True):
            if isinstance(x, Tensor) and types[argument] in tensor_types:
                continue
            # torch's refusal of a tensor there prints it, and a nested one is printed as no list.
            for tensor in tensors_in(x):
                check_memory(f"ascend::{name}", argument, tensor)
            if isinstance(x, Tensor) and x.is_nested:
                expected = _EXPECTED[types[argument]]
                raise wrong(TypeError, f"ascend::{name}", argument, expected, shown(x))
        try:
            return overload(*values[:positional], **keyword_values)
        except RuntimeError as error:
            found = _WRONG_TYPE.search(str(error))
            if found is None or found[1] not in types:
                raise
            argument = found[1]
            got = given[list(schema).index(argument)]
            if argument in _LENGTHS:
                raise _not_lengths((f"ascend::{name}", argument), got) from None
            expected = _EXPECTED[types[argument]]
            raise wrong(TypeError, f"ascend::{name}", argument, expected, shown(got)) from None

    return call


def lengths_of(
    lengths: Lengths, query: Tensor | None = None, where: Where = _LENGTHS_OF_NONE
) -> Sequence[int] | None:
    """As a list. Waits for the device if they are a tensor on it."""
    if isinstance(lengths, Tensor):
        no_numbers = lengths.is_floating_point() or lengths.is_complex() or lengths.is_quantized
        if lengths.dim() != 1 or no_numbers:
            raise _not_lengths(where, lengths)
        if lengths.is_meta and type(lengths) is Tensor:
            got = "a tensor on the device meta"
            raise wrong(ValueError, *where, "lengths to read", got)
        if captures(lengths.device):
            got = "a tensor, which the host cannot read before it runs"
            raise _not_in_graph(where, "a list", got)
        check_memory(*where, lengths)
        if lengths._is_zerotensor():
            # torch's zeros without memory, as forward-mode derivatives have them.
            lengths = lengths.clone()
        return cast("list[int]", lengths.tolist())
    if lengths is not None and getattr(lengths, "ndim", 0) == 1:
        # An array, which is neither true nor false.
        lengths = list(lengths)
    if isinstance(lengths, (list, tuple)):
        # Whole numbers may be symbols here.
        if any(type(x) is not int and whole(x) is None for x in lengths):
            raise _not_lengths(where, lengths)
    elif not _in_order(lengths):
        raise _not_lengths(where, lengths)
    return lengths


def lengths_on(lengths: Lengths, query: Tensor, where: Where = _LENGTHS_OF_NONE) -> Tensor | None:
    """As a tensor on the device of `query`, without waiting for it."""
    # Of a wrong type, they are the operator's to refuse.
    if lengths is None or isinstance(lengths, Tensor) or not hasattr(lengths, "__iter__"):
        return cast("Tensor | None", lengths)
    # And so is the query.
    if not isinstance(query, Tensor):
        return None
    if is_dynamo_compiling():
        return torch.tensor(lengths, dtype=torch.int32, device=query.device)
    if not _in_order(lengths):
        raise _not_lengths(where, lengths)
    try:
        numbers = [index(length) for length in lengths]
    except TypeError:
        raise _not_lengths(where, lengths) from None
    limit = torch.iinfo(torch.int32).max
    if max(map(abs, numbers), default=0) > limit:
        raise wrong(ValueError, *where, f"lengths of at most {limit}", shown(numbers))
    on_host = torch.tensor(numbers, dtype=torch.int32)
    if query.device.type in ("cpu", "meta"):
        return on_host.to(query.device)
    if captures(query.device):
        got = f"{shown(numbers)}, which a replay cannot change"
        raise _not_in_graph(where, f"a tensor on {query.device}", got)
    return on_host.pin_memory().to(query.device, non_blocking=True)


def between(ends: Sequence[int]) -> list[int]:
    """The lengths of sequences, from their prefix sums. A 0 that closes a list is an empty one."""
    return [end - begin for begin, end in pairwise([0, *accumulate(ends, max)])]


def _in_order(lengths: Any) -> bool:
    """False of text, of arrays with several axes, and of what has no order or is read once."""
    if isinstance(lengths, Sequence):
        return not isinstance(lengths, (str, bytes))
    if hasattr(lengths, "__array__"):
        return getattr(lengths, "ndim", 0) == 1
    return not hasattr(lengths, "__iter__")


def _not_lengths(where: Where, got: Any) -> TypeError:
    return wrong(TypeError, *where, "whole numbers, as a list or as a tensor", shown(got))


def _not_in_graph(where: Where, expected: str, got: str) -> NotImplementedError:
    function, argument = where
    text = f"{function}: {argument}: expected {expected}, in a graph's call, got {got}"
    return NotImplementedError(text)


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
