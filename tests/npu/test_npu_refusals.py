"""First phases with arguments that no wrapper of torch_npu's has checked."""

from __future__ import annotations

import ctypes
from typing import Any

import cann_simulator
import pytest
import torch
from conftest import DEVICE, TASK_QUEUE
from torch import Tensor

pytestmark = [
    pytest.mark.skipif(DEVICE != ("A2", "9.1"), reason="independent of the device: on the first"),
    pytest.mark.skipif(TASK_QUEUE != 1, reason="the first phases are called directly: once"),
]

INVALID = 161002
DTYPES = {torch.float32: 0, torch.float16: 1, torch.int8: 2, torch.int32: 3, torch.bfloat16: 27}
ND = 2
F32, BF16 = torch.float32, torch.bfloat16


class First:
    """Calls first phases with any arguments: no wrapper of torch_npu's checks them before."""

    def __init__(self) -> None:
        self.library = cann_simulator.control.library()
        for maker in ("aclCreateTensor", "aclCreateTensorList", "aclCreateIntArray"):
            getattr(self.library, maker).restype = ctypes.c_void_p

    def handle(self, x: Tensor) -> ctypes.c_void_p:
        def array(values: Any) -> Any:
            return (ctypes.c_int64 * len(values))(*values)

        return ctypes.c_void_p(
            self.library.aclCreateTensor(
                array(x.shape), ctypes.c_uint64(x.dim()), DTYPES[x.dtype], array(x.stride()),
                ctypes.c_int64(0), ND, array([x.numel()]), ctypes.c_uint64(1),
                ctypes.c_void_p(x.data_ptr()),
            )
        )  # fmt: skip

    def argument(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.handle(x)
        if isinstance(x, tuple):
            integers = (ctypes.c_int64 * len(x))(*x)
            count = ctypes.c_uint64(len(x))
            return ctypes.c_void_p(self.library.aclCreateIntArray(integers, count))
        if isinstance(x, list):
            handles = (ctypes.c_void_p * len(x))(*(self.handle(item) for item in x))
            return ctypes.c_void_p(
                self.library.aclCreateTensorList(handles, ctypes.c_uint64(len(x)))
            )
        if isinstance(x, bool):
            return ctypes.c_bool(x)
        if isinstance(x, int):
            return ctypes.c_int64(x)
        if isinstance(x, float):
            return ctypes.c_double(x)
        return ctypes.c_char_p(x.encode()) if isinstance(x, str) else ctypes.c_void_p(None)

    def __call__(self, function: str, *arguments: Any) -> int:
        phase = getattr(self.library, f"aclnn{function}GetWorkspaceSize")
        size, executor = ctypes.c_uint64(), ctypes.c_void_p()
        given = [self.argument(x) for x in arguments]
        status: int = phase(*given, ctypes.byref(size), ctypes.byref(executor))
        return status


def new(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_packed_attention_without_lengths() -> None:
    """Which once ended the process."""
    q, statistics = new(4, 2, 128), new(4, 2, 8, dtype=F32)
    assert First()(
        "FlashAttentionVarLenScoreV2", q, q, q, None, None, None, None, None, None, None, None,
        None, 1.0, 1.0, 100, 100, 2, "TND", 0, 0, 1, statistics, statistics, new(0), q,
    ) == INVALID  # fmt: skip
