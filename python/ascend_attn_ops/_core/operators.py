"""The two ways from a public function to its operator."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ascend_attn_ops import _C
from ascend_attn_ops._core.arguments import check_memory, shown, tensors_in, wrong
from ascend_attn_ops._core.packing import lengths_tensor, not_lengths

# pre_tokens and next_tokens that bound nothing, as CANN's dense and sparse functions expect them.
ALL_TOKENS = 2**31 - 1
ALL_TOKENS_SPARSE = 2**63 - 1

# Arguments of torch's function, flash-attn and torch_npu, and the dense operators' own for them.
_INSTEAD = {
    **dict.fromkeys(("is_causal", "causal"), "sparse_mode=3"),
    **dict.fromkeys(("scale", "softmax_scale"), "scale_value"),
    **dict.fromkeys(("head_num", "num_query_heads"), "num_heads"),
    "alibi_slopes": "pse_shift with pse_type=2",
    "dropout_mask": "drop_mask",
    "enable_gqa": "nothing: key and value may have fewer heads",
    "input_layout": "layout",
    "pse": "pse_shift",
    "window_size": "sparse_mode=4 with pre_tokens and next_tokens",
}

# The first line of torch.ops' error about an argument that has another type than the schema.
_WRONG_TYPE = re.compile(r"Expected a value of type '.*' for argument '(\w+)'")
_EXPECTED = {
    "Tensor": "a tensor",
    "Optional[Tensor]": "a tensor or None",
    "List[Tensor]": "a list of tensors",
    "int": "a whole number of 64 bits",
    "Optional[int]": "a whole number of 64 bits or None",
    "float": "a number",
    "Optional[float]": "a number or None",
    "bool": "a bool",
    "str": "a string",
    "Optional[str]": "a string or None",
    "List[int]": "a list of whole numbers of 64 bits",
    "Optional[List[int]]": "a list of whole numbers of 64 bits or None",
}

# Arguments that the public functions take as a tensor or as a list.
LENGTHS = (
    "prefix",
    "actual_seq_lengths_query",
    "actual_seq_lengths_key",
    "actual_seq_lengths_ori_kv",
    "actual_seq_lengths_cmp_kv",
)


def refuse_unknown(function: str, unknown: Iterable[str]) -> None:
    """Raise Python's error for a keyword that a function lacks, with what it has instead."""
    name = next(iter(unknown))
    hint = f"; here it is {_INSTEAD[name]}" if name in _INSTEAD else ""
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


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
    """Calls an operator with all its arguments, in the order of the schema.

    Matching arguments with a schema takes torch.ops longer than a small operator runs. `direct`
    therefore passes them straight to the dispatcher (csrc/python/direct_call.h), and leaves calls
    with anything but plain tensors, numbers and lists to `through_torch`, as does torch.compile,
    which traces torch.ops only.
    """

    def __init__(self, name: str) -> None:
        self.overload = getattr(torch.ops.ascend, name).default
        self.name = f"ascend::{name}"
        arguments = self.overload._schema.arguments
        self.types = {x.name: str(x.type) for x in arguments}
        self.keywords = [x.name for x in arguments if x.kwarg_only]
        self.lengths = [(i, x) for i, x in enumerate(self.types) if x in LENGTHS]
        self.direct = _C.direct_calls[name](self.through_torch, __name__)

    @property
    def call(self) -> Callable[..., Any]:
        """The function to call: passing the arguments on would take a tenth of a small call."""
        return self.through_torch if is_dynamo_compiling() else self.direct

    def through_torch(self, *given: Any) -> Any:
        values = list(given)
        for position, argument in self.lengths:
            values[position] = lengths_tensor(values[position], (self.name, argument))
        if not is_dynamo_compiling():
            # torch reads a list to match it with the schema, and then again for its values.
            values = [
                list(x) if "List" in kind and isinstance(x, Iterator) else x
                for kind, x in zip(self.types.values(), values, strict=True)
            ]
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
        if keywords.get("layout", "") is None:
            keywords["layout"] = "None"  # the operator lists those that it takes
        try:
            return self.overload(*values[:positional], **keywords)
        except RuntimeError as error:
            found = _WRONG_TYPE.search(str(error))
            if found is None or found[1] not in self.types:
                raise
            argument = found[1]
            got = given[list(self.types).index(argument)]
            if argument in LENGTHS:
                raise not_lengths((self.name, argument), got) from None
            expected = _EXPECTED[self.types[argument]]
            raise wrong(TypeError, self.name, argument, expected, shown(got)) from None
