"""Calls of aclnn functions by their C interface: no wrapper of torch_npu's checks them before."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from cann_simulator.control import library
from torch import Tensor

DTYPES = {
    torch.float32: 0, torch.float16: 1, torch.int8: 2, torch.int32: 3, torch.uint8: 4,
    torch.bool: 12, torch.bfloat16: 27,
}  # fmt: skip
ND = 2


def made(function: str, *arguments: Any) -> ctypes.c_void_p:
    maker = getattr(library(), f"aclCreate{function}")
    maker.restype = ctypes.c_void_p
    return ctypes.c_void_p(maker(*arguments))


def integers(values: Any) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def argument(x: Any) -> Any:
    match x:
        case Tensor():
            return made(
                "Tensor", integers(x.shape), ctypes.c_uint64(x.dim()), DTYPES[x.dtype],
                integers(x.stride()), ctypes.c_int64(0), ND, integers([x.numel()]),
                ctypes.c_uint64(1), ctypes.c_void_p(x.data_ptr()),
            )  # fmt: skip
        case tuple():
            return made("IntArray", integers(x), ctypes.c_uint64(len(x)))
        case list():
            handles = (ctypes.c_void_p * len(x))(*map(argument, x))
            return made("TensorList", handles, ctypes.c_uint64(len(x)))
        case bool():
            return ctypes.c_bool(x)
        case int():
            return ctypes.c_int64(x)
        case float():
            return ctypes.c_double(x)
        case str():
            return ctypes.c_char_p(x.encode())
    return ctypes.c_void_p(x)


def first_phase(function: str, *arguments: Any) -> tuple[int, ctypes.c_uint64, ctypes.c_void_p]:
    """Status, size of the workspace and executor."""
    size, executor = ctypes.c_uint64(), ctypes.c_void_p()
    phase = getattr(library(), f"aclnn{function}GetWorkspaceSize")
    status = phase(*map(argument, arguments), ctypes.byref(size), ctypes.byref(executor))
    return status, size, executor
