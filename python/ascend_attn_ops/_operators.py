"""What the public function of an operator calls, and the sequence lengths that it takes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import index
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ascend_attn_ops import _C
from ascend_attn_ops._arguments import check_memory, shown, tensors_in, whole, wrong
from ascend_attn_ops._npu_graphs import captures

# pre_tokens and next_tokens that bound nothing, as CANN's dense and sparse functions expect them.
ALL_TOKENS = 2**31 - 1
ALL_TOKENS_SPARSE = 2**63 - 1

# The first line of torch.ops' error about an argument that has another type than the schema.
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


def signature_of(name: str) -> inspect.Signature:
    """Return the signature that torch.ops.ascend.<name> has."""
    parameter = inspect.Parameter
    return inspect.Signature(
        [
            parameter(
                x.name,
                parameter.KEYWORD_ONLY if x.kwarg_only else parameter.POSITIONAL_OR_KEYWORD,
                default=x.default_value if x.has_default_value() else parameter.empty,
            )
            for x in getattr(torch.ops.ascend, name).default._schema.arguments
        ]
    )


class Operator:
    """Two ways to call an operator with all its arguments, in the order of the schema.

    Matching arguments with a schema takes torch.ops longer than a small operator runs. `direct`
    therefore passes them straight to the dispatcher (csrc/python/direct_call.h), and leaves calls
    with anything but plain tensors and numbers to `through_torch`, as does torch.compile, which
    traces torch.ops only.
    """

    def __init__(self, name: str) -> None:
        self.overload = getattr(torch.ops.ascend, name).default
        self.name = f"ascend::{name}"
        arguments = self.overload._schema.arguments
        self.types = {x.name: str(x.type) for x in arguments}
        self.keywords = [x.name for x in arguments if x.kwarg_only]
        self.lengths = [(i, x) for i, x in enumerate(self.types) if x in _LENGTHS]
        on_device = self.types.get(_LENGTHS[0]) == "Optional[Tensor]"
        self.convert = lengths_on if on_device else lengths_of
        self.direct = _C.direct_calls[name](self.through_torch, __name__)

    def through_torch(self, *given: Any) -> Any:
        values = list(given)
        for position, argument in self.lengths:
            values[position] = self.convert(values[position], values[0], (self.name, argument))
        positional = len(values) - len(self.keywords)
        keywords = dict(zip(self.keywords, values[positional:], strict=True))
        if is_dynamo_compiling():
            return self.overload(*values[:positional], **keywords)
        for (argument, kind), x in zip(self.types.items(), values, strict=True):
            if isinstance(x, Tensor) and kind in ("Tensor", "Optional[Tensor]"):
                continue
            # torch's refusal of a tensor there prints it, and a nested one is printed as no list.
            for tensor in tensors_in(x):
                check_memory(self.name, argument, tensor)
            if isinstance(x, Tensor) and x.is_nested:
                raise wrong(TypeError, self.name, argument, _EXPECTED[kind], shown(x))
        try:
            return self.overload(*values[:positional], **keywords)
        except RuntimeError as error:
            found = _WRONG_TYPE.search(str(error))
            if found is None or found[1] not in self.types:
                raise
            argument = found[1]
            got = given[list(self.types).index(argument)]
            if argument in _LENGTHS:
                raise _not_lengths((self.name, argument), got) from None
            expected = _EXPECTED[self.types[argument]]
            raise wrong(TypeError, self.name, argument, expected, shown(got)) from None


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
