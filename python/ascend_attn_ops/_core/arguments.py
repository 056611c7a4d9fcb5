"""One-line errors for arguments, and the checks that several functions share."""

from __future__ import annotations

import re
import reprlib
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from operator import index
from typing import Any, TypeVar

import torch
from torch import Tensor

from ascend_attn_ops import _C
from ascend_attn_ops._core.torch_private import FakeTensor, is_fake, is_functorch_wrapped_tensor

_OF_CANN = {f"ascend::{name}" for name in _C.direct_calls}
_LONGEST = 100  # characters of a value in a message
_WHOLE = (int, torch.SymInt)
_LARGEST_FLOAT = int(sys.float_info.max)
INT64_MAX = 2**63 - 1
_ELEMENT = re.compile(r"(?<= at )\d+(?= \[)")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}

Error = TypeVar("Error", bound=Exception)


def wrong(kind: type[Error], function: str, argument: str, expected: str, got: str) -> Error:
    """The error to raise; `shown` makes `got` of what the caller gave."""
    status = " [ACLNN_ERR_PARAM_INVALID 161002]" if function in _OF_CANN else ""
    return kind(f"{function}: {argument}: expected {expected}, got {got}{status}")


def renamed(text: str, names: Mapping[str, str], parts: int = 1) -> str:
    """The message of an operator with the names of the caller, as `names` has them.

    The caller's cu_seqlens begin with a 0, which operators do not get, and each of its lengths may
    be `parts` of theirs: the numbers of elements follow.
    """
    text = re.sub("|".join(names), lambda found: names[found[0]], text)
    first = int(": cu" in text)
    return _ELEMENT.sub(lambda found: str(int(found[0]) // parts + first), text)


@cache
def warn_once(function: str, argument: str, text: str) -> None:
    """Warns of what is no error but hardly meant, at its first occurrence in a process.

    The warning shows the line that called this package.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_of_this_package(frame.f_globals):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"{function}: {argument}: {text}", stacklevel=level)


def _is_of_this_package(names: dict[str, Any]) -> bool:
    return str(names.get("__name__")).partition(".")[0] == __package__.partition(".")[0]


def refuse_traces(function: str) -> None:
    """Raise where torch.compile traces a block that it cannot have in a graph."""
    if torch.compiler.is_compiling():
        text = "torch.compile cannot trace this block; call the compiled function inside it"
        raise RuntimeError(f"{function}: {text}")


class _Shown(reprlib.Repr):
    """Shows tensors in containers without their values, whose memory may have been freed."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = _LONGEST
        self.maxstring = self.maxlong = self.maxother = _LONGEST

    def repr1(self, x: object, level: int) -> str:
        return shown(x) if isinstance(x, Tensor) else super().repr1(x, level)


def shown(value: object) -> str:
    """A value of the caller, on one line that is not long."""
    if isinstance(value, Tensor):
        sizes = "of several shapes" if value.is_nested else list(value.shape)
        return f"a tensor of {dtype_name(value.dtype)} {sizes}"
    containers = (list, tuple, dict, set)
    text = " ".join((_Shown().repr if isinstance(value, containers) else repr)(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def whole(x: Any) -> Any:
    """A whole number, maybe a symbol; None for anything else."""
    if isinstance(x, _WHOLE):
        # torch takes a bool for a number in fewer places.
        return int(x) if isinstance(x, bool) else x
    try:
        # torch.ops takes a tensor with one element for a number.
        return int(x) if isinstance(x, Tensor) and x.numel() == 1 else index(x)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # RuntimeError: torch cannot read a tensor on the device meta.
        return None


def is_number(x: object) -> bool:
    """Whether torch.ops takes it for a float."""
    if isinstance(x, int):
        return abs(x) <= _LARGEST_FLOAT
    if isinstance(x, (float, int, torch.SymFloat, torch.SymInt)):
        return True
    if isinstance(x, Tensor):
        # Comparison requires a dense tensor.
        dense = x.layout == torch.strided and not (x.is_nested or x.is_quantized)
        return dense and x.numel() == 1 and not x.is_complex()
    # Numbers of numpy, but not its arrays.
    return hasattr(x, "__float__") and not hasattr(x, "__len__")


def check_number(function: str, argument: str, x: object, read: bool = True) -> None:
    """`read`: whether its value is needed here. If not, it may be a tensor on the device meta."""
    if not is_number(x) or (read and isinstance(x, Tensor) and x.is_meta):
        raise wrong(TypeError, function, argument, "a number", shown(x))
    if isinstance(x, Tensor):
        check_memory(function, argument, x)


def check_factor(function: str, argument: str, x: object) -> None:
    """Raises unless it is a number, or a tensor of one element, which is not read."""
    if isinstance(x, Tensor) and x.numel() != 1:
        raise wrong(ValueError, function, argument, "one element", f"shape {tuple(x.shape)}")
    check_number(function, argument, x, read=False)


def check_flag(function: str, argument: str, x: object) -> None:
    # The bool of numpy is a type of its own, with either name.
    if not isinstance(x, int) and type(x).__name__ not in ("bool", "bool_"):
        raise wrong(TypeError, function, argument, "a bool", shown(x))


def check_count(function: str, argument: str, x: Any, least: int = 0, most: int = INT64_MAX) -> Any:
    """The whole number that it is."""
    number = whole(x)
    if number is None:
        raise wrong(TypeError, function, argument, "a whole number", shown(x))
    if not least <= number <= most:
        allowed = f"at least {least}" if most == INT64_MAX else f"{least}..{most}"
        raise wrong(ValueError, function, argument, allowed, shown(number))
    return number


def check_tensor(
    function: str, argument: str, x: object, rank: int | None = None, axes: str = ""
) -> None:
    """`axes`: of a tensor of this rank, for the message."""
    if not isinstance(x, Tensor):
        raise wrong(TypeError, function, argument, "a tensor", type(x).__name__)
    if x.is_nested:
        raise wrong(ValueError, function, argument, "a tensor of one shape", "a nested one")
    # Dynamo reads no layouts in a backward.
    if not torch.compiler.is_compiling() and x.layout != torch.strided:
        raise wrong(NotImplementedError, function, argument, "a dense tensor", str(x.layout))
    if rank is not None and x.dim() != rank:
        raise wrong(ValueError, function, argument, f"shape {axes}", str(list(x.shape)))


def check_memory(function: str, argument: str, x: Tensor) -> None:
    """Refuses freed storages: torch's own functions crash when they read one."""
    # Classes with a dispatch of their own may have no storage, or none with their elements, and so
    # do other layouts.
    wraps = type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if wraps or not readable(x) or is_functorch_wrapped_tensor(x):
        return
    if x.is_nested or x.is_quantized or x._is_zerotensor() or _C.has_memory(x):
        return
    got = f"one of {x.untyped_storage().nbytes()} bytes for shape {list(x.shape)} and strides "
    got += f"{list(x.stride())} at offset {x.storage_offset()}; FSDP and resize_() free memory"
    raise wrong(ValueError, function, argument, "a storage that holds every element", got)


def bytes_in(size: object) -> int | None:
    """The bytes of a size such as "200MB" or "1.5 GB"; None of anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(KB|MB|GB)", size) if isinstance(size, str) else None
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


def tensors_in(x: object) -> Iterator[Tensor]:
    """The tensors in nested containers, or the tensor itself."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple, dict)):
        for item in x.values() if isinstance(x, dict) else x:
            yield from tensors_in(item)


def has_values(x: Tensor) -> bool:
    """Whether its values can be read: neither it nor what is made now is fake."""
    return not (x.is_meta or is_fake(x) or is_fake(torch.empty(0)))


def readable(x: Tensor) -> bool:
    """Whether its values can be looked at without waiting for a device."""
    dense = x.is_cpu and x.layout == torch.strided
    return dense and not torch.compiler.is_compiling() and not isinstance(x, FakeTensor)
