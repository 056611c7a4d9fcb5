"""aclnn functions that a user adds to the simulation."""

from __future__ import annotations

import ctypes
import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from cann_simulator._start import is_running
from cann_simulator.control import library, synchronize

_Compute = TypeVar("_Compute", bound=Callable[..., Any])

# aclDataType.
_DTYPES = {
    0: torch.float32, 1: torch.float16, 2: torch.int8, 3: torch.int32, 4: torch.uint8,
    6: torch.int16, 7: torch.uint16, 8: torch.uint32, 9: torch.int64, 10: torch.uint64,
    11: torch.float64, 12: torch.bool, 16: torch.complex64, 17: torch.complex128,
    27: torch.bfloat16,
}  # fmt: skip
_NUMBERS = {
    "bool": ctypes.c_bool, "char*": ctypes.c_char_p, "double": ctypes.c_double,
    "float": ctypes.c_float, "int": ctypes.c_int32, "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64, "uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64,
    "aclDataType": ctypes.c_int32,
}  # fmt: skip
_HANDLES = ("aclTensor*", "aclTensorList*", "aclIntArray*", "aclScalar*")
_RESULTS = ("uint64_t*", "aclOpExecutor**")

_SUCCESS, _INVALID, _FAILED = 0, 161002, 361001


class _TensorFields(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dimensions", ctypes.c_int64),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    )


@dataclass(frozen=True)
class _View:
    """A tensor of the NPU, as the first phase is given it."""

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """Return the CPU tensor with that memory."""
        if 0 in self.sizes:
            return torch.empty(self.sizes, dtype=self.dtype)
        steps = zip(self.sizes, self.strides, strict=True)
        elements = self.offset + sum((size - 1) * stride for size, stride in steps) + 1
        memory = (ctypes.c_char * (elements * self.dtype.itemsize)).from_address(self.address)
        flat = torch.frombuffer(memory, dtype=self.dtype)
        return flat.as_strided(self.sizes, self.strides, self.offset)

    def described(self) -> dict[str, Any]:
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "sizes": self.sizes, "strides": self.strides, "offset": self.offset,
        }  # fmt: skip


@dataclass(frozen=True)
class _Parameter:
    name: str
    type: str
    is_const: bool

    @property
    def is_output(self) -> bool:
        return self.type in _HANDLES[:2] and not self.is_const

    @property
    def c_type(self) -> Any:
        return ctypes.c_void_p if self.type.startswith("acl") and "*" in self.type else (
            _NUMBERS[self.type]
        )  # fmt: skip


def _parameters(prototype: str) -> list[_Parameter]:
    """Return the arguments of a C prototype without those in which the first phase answers."""
    found = re.search(r"\((.*)\)", prototype, re.DOTALL)
    parameters = []
    for text in (found.group(1) if found else prototype).split(","):
        words = re.findall(r"\w+|\*", text)
        is_const = "const" in words
        words = [word for word in words if word not in ("const", "struct")]
        type_, name = "".join(words[:-1]), words[-1] if words else ""
        if type_ in _RESULTS:
            continue
        if type_ not in (*_HANDLES, *_NUMBERS):
            raise ValueError(
                f"prototype: expected arguments of the types {', '.join((*_HANDLES, *_NUMBERS))}; "
                f"got {text.strip()!r}"
            )
        parameters.append(_Parameter(name, type_, is_const))
    return parameters


def _view(handle: int) -> _View:
    fields = _TensorFields()
    library().cann_sim_read_tensor(ctypes.c_void_p(handle), ctypes.byref(fields))
    return _view_of(fields)


def _view_of(fields: _TensorFields) -> _View:
    dimensions = range(fields.dimensions)
    return _View(
        fields.data or 0, tuple(fields.sizes[i] for i in dimensions),
        tuple(fields.strides[i] for i in dimensions), fields.offset, _DTYPES[fields.dtype],
    )  # fmt: skip


def _value(type_: str, given: Any) -> Any:
    """Return what an argument holds: handles do not outlive the first phase."""
    if given is None or not type_.startswith("acl") or "*" not in type_:
        return given.decode() if isinstance(given, bytes) else given
    handle = ctypes.c_void_p(given)
    if type_ == "aclTensor*":
        return _view(given)
    if type_ == "aclTensorList*":
        tensors = ctypes.POINTER(ctypes.c_void_p)()
        size = library().cann_sim_read_list(handle, ctypes.byref(tensors))
        return [_view(tensors[i]) for i in range(size)]
    if type_ == "aclIntArray*":
        integers = ctypes.POINTER(ctypes.c_int64)()
        size = library().cann_sim_read_integers(handle, ctypes.byref(integers))
        return [integers[i] for i in range(size)]
    dtype = ctypes.c_int64()
    number = float(library().cann_sim_read_scalar(handle, ctypes.byref(dtype)))
    return number if _DTYPES[dtype.value].is_floating_point else int(number)


def _tensors(value: Any) -> Any:
    """Return the CPU tensors in the place of views."""
    if isinstance(value, _View):
        return value.tensor()
    if isinstance(value, list):
        return [_tensors(item) for item in value]
    return value


class _Function:
    """The two phases of an aclnn function, around a function of CPU tensors."""

    def __init__(self, name: str, prototype: str, compute: Callable[..., Any]) -> None:
        self.name, self.compute = name, compute
        self.parameters = _parameters(prototype)
        wanted = list(inspect.signature(compute).parameters)
        known = [parameter.name for parameter in self.parameters]
        if unknown := [name for name in wanted if name not in known]:
            raise ValueError(f"{name}: expected arguments of its prototype, got {unknown}")
        self.wanted = [known.index(name) for name in wanted]
        self.outputs = [
            index for index, parameter in enumerate(self.parameters)
            if parameter.is_output and index not in self.wanted
        ]  # fmt: skip
        self.calls: dict[int, list[Any]] = {}
        self.numbers = itertools.count(1)
        pointer = ctypes.c_void_p
        types = [parameter.c_type for parameter in self.parameters]
        self.first = ctypes.CFUNCTYPE(ctypes.c_int, *types, pointer, pointer)(self._first_phase)
        self.second = ctypes.CFUNCTYPE(
            ctypes.c_int, pointer, ctypes.c_uint64, pointer, pointer
        )(self._second_phase)  # fmt: skip

    def install(self) -> None:
        if not library().cann_sim_add_function(
            self.name.encode(),
            ctypes.cast(self.first, ctypes.c_void_p),
            ctypes.cast(self.second, ctypes.c_void_p),
        ):
            raise RuntimeError(f"{self.name}: the simulation has no room for another function")

    def _first_phase(self, *given: Any) -> int:
        *arguments, workspace_size, executor = given
        try:
            types = [parameter.type for parameter in self.parameters]
            values = [_value(*pair) for pair in zip(types, arguments, strict=True)]
        except Exception as error:
            return self._failed(_INVALID, error)
        number = next(self.numbers)
        self.calls[number] = values
        ctypes.c_uint64.from_address(workspace_size).value = 0
        ctypes.c_uint64.from_address(executor).value = number
        # The memory of executors, of which this call has none.
        library().ReleaseHugeMem(None, False)
        return _SUCCESS

    def _second_phase(self, workspace: Any, size: int, executor: int, stream: Any) -> int:
        values = self.calls.pop(executor)
        names = (parameter.name for parameter in self.parameters)
        described = dict(zip(names, values, strict=True))
        library().cann_sim_note_call(
            self.name.encode(),
            json.dumps(described, default=_View.described).encode(),
            ctypes.c_void_p(stream),
        )
        try:
            with torch.no_grad():
                results = self.compute(*(_tensors(values[index]) for index in self.wanted))
                self._write(results, [values[index] for index in self.outputs])
        except Exception as error:
            return self._failed(_FAILED, error)
        return _SUCCESS

    def _write(self, results: Any, outputs: Sequence[Any]) -> None:
        if not isinstance(results, (tuple, list)):
            results = [] if results is None else [results]
        if len(results) != len(outputs):
            raise ValueError(f"expected {len(outputs)} results, got {len(results)}")
        for output, result in zip(outputs, results, strict=True):
            if isinstance(output, _View):
                output.tensor().copy_(result)
            elif output is not None:
                for one, its_result in zip(output, result, strict=True):
                    one.tensor().copy_(its_result)

    def _failed(self, status: int, error: Exception) -> int:
        message = f"{self.name}: {type(error).__name__}: {error}"
        library().cann_sim_set_error(message.encode())
        return status


# ctypes calls them for as long as the process lives.
_functions: list[_Function] = []


def function(name: str, prototype: str) -> Callable[[_Compute], _Compute]:
    """Add an aclnn function to the simulation of this process: a decorator.

    The function gets the arguments of the prototype that it names, tensors as CPU tensors in the
    memory of the NPU's, and returns what belongs into the outputs, in their order. An output, which
    is a tensor that is not const, can be named as well: the function then changes it in place::

        @cann_simulator.function("aclnnMish", "const aclTensor* self, aclTensor* out")
        def mish(self):
            return torch.nn.functional.mish(self)

    Add it before it is first called: torch_npu remembers what a CANN lacks.

    Args:
        name: The name of the function, without GetWorkspaceSize.
        prototype: Its arguments in C, with or without the last two, workspaceSize and executor.
    """

    def add(compute: _Compute) -> _Compute:
        if not is_running():
            raise RuntimeError("no simulation is running: call cann_simulator.start() first")
        added = _Function(name, prototype, compute)
        added.install()
        _functions.append(added)
        return compute

    return add


_NUMBER = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_double)
_TENSOR = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(_TensorFields)
)  # fmt: skip


@contextmanager
def altered(
    function: str,
    numbers: Mapping[str, Callable[[float], float]] | None = None,
    tensors: Mapping[str, Callable[[Tensor], object]] | None = None,
) -> Iterator[None]:
    """Make the kernel of a function err: on other numbers, or in what it writes.

    Args:
        function: The name of the aclnn function.
        numbers: By the name of an argument in the prototype, what the kernel takes its number for,
            or each of its numbers.
        tensors: By the name of an argument, a function that changes the tensor in place when the
            kernel has run.
    """

    def number(of: bytes, name: bytes, value: float) -> float:
        change = (numbers or {}).get(name.decode())
        return float(change(value)) if change and of.decode() == function else value

    def tensor(of: bytes, name: bytes, fields: Any) -> None:
        change = (tensors or {}).get(name.decode())
        if change and of.decode() == function:
            with torch.no_grad():
                change(_view_of(fields.contents).tensor())

    callbacks = _NUMBER(number), _TENSOR(tensor)
    library().cann_sim_alter(*callbacks)
    try:
        yield
    finally:
        synchronize()
        library().cann_sim_alter(None, None)
