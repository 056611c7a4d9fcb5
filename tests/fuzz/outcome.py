"""The outcome of a call, and whether its error is one that the documentation promises."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support.samples import as_tuple
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor

from .case import Finding
from .copies import as_lists, can_be_read, has_memory, tensors_in

LIBRARY = re.compile(
    r"ascend::([\w.]+): ([\w\[\].]+): expected (.+), got (.+?)( \[ACLNN_ERR_[A-Z_]+ \d{6}\])?"
)
# Functions with the names of another package refuse what no operator has in their own form.
_FLASH_ATTN = re.compile(
    r"(flash_attn_\w+): (\w+): expected (.+), got (.+?)( \[ACLNN_ERR_[A-Z_]+ \d{6}\])?"
)
_KINDS = (TypeError, ValueError, NotImplementedError)
_MOST_CHARACTERS = 1_000
# Errors may name these, which are no arguments.
_NO_ARGUMENTS = ("product", "device")

# torch's errors for arguments that do not match a schema, before an operator is called.
_SCHEMA = re.compile(
    r"(Overloaded torch operator invoked from Python failed to match any schema:\n)?"
    r"(ascend::\w+\(\) (Expected a value of type '[^']+' for argument '\w+'|is missing value for |"
    r"takes \d+ positional|expected at most)|Unknown keyword argument '\w+' for operator 'ascend::|"
    r"Argument '\w+' specified both as positional and keyword argument)"
)
# Its error for a tensor of bool in the place of lengths.
_BOOL_FOR_LENGTH = re.compile(r"scalar\.isIntegral\( ?false\) ?INTERNAL ASSERT FAILED")
# Python's errors for arguments that do not match a signature.
_SIGNATURE = re.compile(
    r"[\w.]+\(\) (missing \d+ required|got an unexpected keyword argument|takes \d+ positional|"
    r"takes from \d+ to \d+ positional|got multiple values for argument|"
    r"missing a required argument|got some positional-only)"
)
# The error of a torch subclass that has no rule for our operators.
_JAGGED = re.compile(r"'?ascend\.\w+\.\w+'?")
# A subclass's error for freed memory, raised by its own functions.
_NO_STORAGE = ("setStorage: sizes", "The tensor has a non-zero number of elements, but its data is")
# Errors for sizes that no memory holds, though no argument is wrong in itself.
_NO_MEMORY = re.compile(
    r".*DefaultCPUAllocator: can't allocate memory|(Storage size|Stride) calculation overflowed|"
    r"numel: integer multiplication overflow|IntArrayRef contains an int that cannot be represented"
)


@dataclass
class Outcome:
    """Either outputs or an error."""

    outputs: tuple[Tensor, ...] = ()
    error: BaseException | None = None

    @property
    def text(self) -> str:
        return str(self.error)

    @property
    def of_library(self) -> bool:
        return self.error is not None and LIBRARY.fullmatch(self.text) is not None


def run(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Outcome:
    try:
        returned = function(*args, **options)
    except Exception as error:
        # Its frames hold all tensors of the case.
        return Outcome(error=error.with_traceback(None))
    return Outcome(as_tuple(returned))


def check_error(outcome: Outcome, given: object, names: set[str], through_torch: bool) -> str:
    """Says whose the error is. `names`: of all arguments that one may name."""
    error, text = outcome.error, outcome.text
    assert error is not None
    given = as_lists(given)
    found = LIBRARY.fullmatch(text) or _FLASH_ATTN.fullmatch(text)
    if found:
        if type(error) not in _KINDS:
            raise Finding(f"an error of type {type(error).__name__}: {text}")
        if found[2].partition("[")[0] not in {*names, *_NO_ARGUMENTS}:
            raise Finding(f"no argument is called {found[2]!r}: {text}")
        if found[2] == "device" and found[4] == "cpu":
            raise Finding(f"the CPU is a device: {text}")
        if len(text) > _MOST_CHARACTERS:
            raise Finding(f"{len(text)} characters: {text[:_MOST_CHARACTERS]}...")
        return "refused"
    if _is_torchs(error, text, given, through_torch):
        return "refused by torch"
    raise Finding(f"not the library's form of an error: {type(error).__name__}: {text[:500]!r}")


def _is_torchs(error: BaseException, text: str, given: object, through_torch: bool) -> bool:
    kind = type(error)
    if through_torch and kind is RuntimeError and _SCHEMA.match(text):
        return True
    if through_torch and kind is RuntimeError and _BOOL_FOR_LENGTH.match(text):
        return any(x.dtype == torch.bool for x in tensors_in(given))
    if not through_torch and kind is TypeError and _SIGNATURE.match(text):
        return True
    tensors = list(tensors_in(given))
    # One in the place of a number, which torch.ops reads, whatever the others are.
    reads = re.match("Cannot access storage of (Opaque|Sparse|SparseCsr)TensorImpl", text)
    if reads and any(x.layout is not torch.strided for x in tensors):
        return True
    if any(x._is_zerotensor() for x in tensors) and text.startswith("ZeroTensors are immutable"):
        return kind is RuntimeError
    if any(x.is_inference() for x in tensors) and text.startswith("Inference tensors cannot be "):
        return kind is RuntimeError
    if any(isinstance(x, FakeTensor) for x in tensors):
        # Fake tensors refuse everything outside their mode, in texts of their own.
        if "fake" in text.lower() or "meta" in text or _JAGGED.fullmatch(text):
            return True
        # As lengths that the host reads.
        return isinstance(error, DataDependentOutputException)
    if through_torch and any(x.is_nested for x in tensors) and "NestedTensorImpl doesn't" in text:
        return kind is RuntimeError
    if any(type(x) is not Tensor for x in tensors) and text.startswith(_NO_STORAGE):
        # The memory of this subclass was freed.
        return kind is RuntimeError
    freed = any(has_memory(x) and not can_be_read(x) for x in tensors)
    if through_torch and freed and text.startswith("setStorage: sizes [], "):
        return kind is RuntimeError
    # torch.ops reads one in the place of a number.
    as_number = through_torch and text == "aten._local_scalar_dense.default"
    nested = kind is NotImplementedError and any(x.is_nested for x in tensors)
    return nested and (as_number or _JAGGED.fullmatch(text) is not None)


def is_out_of_memory(outcome: Outcome) -> bool:
    # Python's has no text, of a list that is too long. Our C++ has no reason to raise its own.
    pythons = isinstance(outcome.error, MemoryError) and not outcome.text
    return pythons or _NO_MEMORY.match(outcome.text) is not None


def cannot_be_shown(given: object) -> bool:
    """Whether a call with a fake tensor has one whose elements torch cannot read.

    torch's refusal shows all tensors, and where that fails, the dispatcher stays in another state.
    """
    tensors = list(tensors_in(as_lists(given)))
    return any(isinstance(x, FakeTensor) for x in tensors) and any(
        has_memory(x) and not can_be_read(x) for x in tensors
    )


_DISPATCHER = torch._C._dispatch_tls_local_exclude_set().raw_repr()


def check_dispatcher() -> None:
    """Or all later calls would go other ways."""
    if torch._C._dispatch_tls_local_exclude_set().raw_repr() != _DISPATCHER:
        raise Finding("the dispatcher of torch is left in another state")


def same_bits(x: Tensor, y: Tensor) -> bool:
    """A NaN equals itself."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    x, y = x.detach(), y.detach()
    return torch.equal(x, y) or bool(((x == y) | ((x != x) & (y != y))).all())
