"""The calls that CANN's compiled host code refuses, with its status: each class of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import cann_simulator
import pytest
import torch
from support.simulated_npu import once
from torch import Tensor

pytestmark = [
    once,
]

NO_TENSOR, NULL_POINTER, INVALID, TILING, INNER_NULL_POINTER = -1, 161001, 161002, 561002, 561103
DTYPES = {
    torch.float32: 0, torch.float16: 1, torch.int8: 2, torch.int32: 3, torch.uint8: 4,
    torch.bool: 12, torch.bfloat16: 27,
}  # fmt: skip
ND = 2
F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32


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


def update(
    parts: int = 2, d: int = 64, kind: int = 0, out: Tensor | None = None, lse: Any = None
) -> int:
    return First()(
        "AttentionUpdate", [new(8, dtype=F32)] * parts, [new(8, d)] * parts, kind,
        new(8, d) if out is None else out, lse,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [-1, 3, 7, 9])
def test_types_of_an_update(kind: int) -> None:
    assert update(kind=kind) == INVALID
    assert update(kind=0) == 0
    assert update(kind=1, lse=new(8, dtype=F32)) == 0


def test_lse_of_an_update() -> None:
    assert update(kind=0, lse=new(8, dtype=F32)) == INVALID
    assert update(kind=1) == NULL_POINTER
    assert update(kind=1, lse=new(8, dtype=BF16)) == INNER_NULL_POINTER
    assert update(kind=1, lse=new(9, dtype=F32)) == INNER_NULL_POINTER


def test_output_of_an_update() -> None:
    assert update(out=new(8, 64, dtype=F32)) == INNER_NULL_POINTER
    assert update(out=new(8, 32)) == INNER_NULL_POINTER


def test_sizes_of_an_update() -> None:
    assert update(d=60) == INVALID
    assert update(parts=128) == 0
    assert update(parts=129) == INVALID


def score(out: torch.dtype = BF16, statistics: torch.dtype = F32) -> int:
    q = new(1, 2, 4, 64)
    maximum, total = (new(1, 2, 4, 8, dtype=statistics) for _ in range(2))
    return First()(
        "FlashAttentionScoreV2", q, q, q, None, None, None, None, None, None, None, 1.0, 1.0,
        100, 100, 2, "BNSD", 0, 0, 1, maximum, total, new(0), new(1, 2, 4, 64, dtype=out),
    )  # fmt: skip


def test_outputs_of_dense_attention() -> None:
    assert score() == 0
    assert score(out=F32) == NULL_POINTER
    assert score(statistics=BF16) == NULL_POINTER


def score_grad(layout: str, q: Tensor, v: Tensor, heads: int, **outputs: Any) -> int:
    statistics = new(1, heads, 1, 8, dtype=F32)
    pse = outputs.get("pse")
    return First()(
        "FlashAttentionScoreGradV2", q, q, v, v, pse, None, None, None, statistics, statistics,
        None, v, None, None, None, 1.0, 1.0, 100, 100, heads, layout, 0, 0, 1,
        outputs.get("dq", q), q, v, outputs.get("dpse", new(0)),
    )  # fmt: skip


def test_outputs_of_dense_gradients() -> None:
    q, pse = new(1, 2, 4, 64), new(1, 2, 4, 4)
    assert score_grad("BNSD", q, q, 2) == 0
    assert score_grad("BNSD", q, q, 2, dq=q.float()) == NULL_POINTER
    assert score_grad("BNSD", q, q, 2, dq=new(1, 2, 4, 32)) == NULL_POINTER
    assert score_grad("BNSD", q, q, 2, pse=pse, dpse=pse) == 0
    assert score_grad("BNSD", q, q, 2, pse=pse, dpse=pse.float()) == NULL_POINTER
    assert score_grad("BNSD", q, q, 2, pse=pse, dpse=new(1, 2, 4, 3)) == NULL_POINTER


@pytest.mark.parametrize(
    ("layout", "b", "n", "status"),
    [
        ("SBH", 1, 256, NULL_POINTER),
        ("SBH", 2, 128, NULL_POINTER),
        ("SBH", 1, 255, 0),
        ("BSH", 1, 256, NULL_POINTER),
        ("BSH", 2, 128, 0),
        ("BSND", 1, 256, NULL_POINTER),
        ("BNSD", 1, 256, 0),
    ],
)
def test_smaller_values_of_many_heads(layout: str, b: int, n: int, status: int) -> None:
    def tensor(d: int) -> Tensor:
        axes = {"B": b, "S": 1, "N": n, "D": d, "H": n * d}
        return new(*(axes[axis] for axis in layout))

    assert score_grad(layout, tensor(192), tensor(128), n) == status
    assert score_grad(layout, tensor(192), tensor(192), n) == 0


def test_the_deterministic_gradient_takes_smaller_values() -> None:
    call = ("BSND", new(1, 1, 256, 192), new(1, 1, 256, 128), 256)
    runtime, switch = ctypes.CDLL("libascendcl.so"), 0
    torch.npu.synchronize()
    runtime.aclrtCtxSetSysParamOpt(switch, ctypes.c_int64(1))
    try:
        assert score_grad(*call) == 0
    finally:
        runtime.aclrtCtxSetSysParamOpt(switch, ctypes.c_int64(0))
    assert score_grad(*call) == NULL_POINTER


def packed(dtype: torch.dtype, rope: torch.dtype) -> int:
    """The forward of one sequence with ropes."""
    q, q_rope = new(4, 2, 64, dtype=dtype), new(4, 2, 32, dtype=rope)
    statistics, mask = new(4, 2, 8, dtype=F32), new(4, 4, dtype=torch.bool)
    return First()(
        "FlashAttentionVarLenScoreV3", q, q_rope, q, q_rope, q, *[None] * 3, mask, None, (4,), (4,),
        None, None, 1.0, 1.0, 100, 100, 2, "TND", 0, 0, 1, statistics, statistics, new(0), q,
    )  # fmt: skip


def packed_grad(dtype: torch.dtype, rope: torch.dtype) -> int:
    q, q_rope = new(4, 2, 64, dtype=dtype), new(4, 2, 32, dtype=rope)
    statistics, mask = new(4, 2, 8, dtype=F32), new(4, 4, dtype=torch.bool)
    return First()(
        "FlashAttentionUnpaddingScoreGradV3", q, q_rope, q, q_rope, q, q, *[None] * 3, mask,
        statistics, statistics, None, q, None, (4,), (4,), None, None, 1.0, 1.0, 100, 100, 2, "TND",
        0, 0, 1, q, q_rope, q, q_rope, q, new(0),
    )  # fmt: skip


@pytest.mark.parametrize("call", [packed, packed_grad])
def test_dtypes_of_ropes(call: Callable[[torch.dtype, torch.dtype], int]) -> None:
    assert call(BF16, BF16) == 0
    assert call(torch.float16, torch.float16) == INVALID
    assert call(F32, F32) == INVALID


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 0),
        ({"mask": None}, INVALID),
        ({"pse": "bias"}, INVALID),
        ({"drop": "bits", "keep": 0.5}, INVALID),
        ({"mode": 6, "prefix": (4,)}, INVALID),
        ({"d": 72}, INVALID),
        ({"rope": 80}, INVALID),
        ({"value": 32}, INVALID),
    ],
    ids=str,
)
def test_calls_that_take_no_ropes(changes: dict[str, Any], status: int) -> None:
    """The host pads no head beside a rope, and combines ropes with a mask alone."""
    given: dict[str, Any] = {
        "d": 64, "rope": 32, "mask": "mask", "pse": None, "drop": None, "keep": 1.0, "mode": 0,
        "prefix": None, **changes,
    }  # fmt: skip
    tensors = {
        "mask": new(4, 4, dtype=torch.bool), "bias": new(2 * 4 * 4),
        "bits": new(4, dtype=torch.uint8), None: None,
    }  # fmt: skip
    q, q_rope = new(4, 2, given["d"]), new(4, 2, given["rope"])
    v = new(4, 2, given.get("value", given["d"]))
    statistics = new(4, 2, 8, dtype=F32)
    actual = First()(
        "FlashAttentionVarLenScoreV5", q, q_rope, q, q_rope, v, tensors[given["pse"]],
        tensors[given["drop"]], None, tensors[given["mask"]], None, given["prefix"], (4,), (4,),
        None, None, 1.0, given["keep"], 100, 100, 2, "TND", 0, given["mode"], 1, "", statistics,
        statistics, new(0), v,
    )  # fmt: skip
    assert actual == status


@pytest.mark.parametrize("wrong", ["dq_rope", "dk_rope", "dsink"])
def test_gradients_of_ropes_and_sinks_have_their_shapes(wrong: str) -> None:
    q, rope, sink = new(4, 2, 64), new(4, 2, 32), new(2, dtype=F32)
    statistics, mask = new(4, 2, 8, dtype=F32), new(4, 4, dtype=torch.bool)

    def gradient(**outputs: Tensor) -> int:
        out = {"dq_rope": rope, "dk_rope": rope, "dsink": sink, **outputs}
        return First()(
            "FlashAttentionUnpaddingScoreGradV5", q, rope, q, rope, q, q, *[None] * 3, mask,
            statistics, statistics, None, q, sink, None, (4,), (4,), None, None, 1.0, 1.0, 100, 100,
            2, "TND", 0, 0, 1, "", q, out["dq_rope"], q, out["dk_rope"], q, new(0), out["dsink"],
        )  # fmt: skip

    assert gradient() == 0
    assert gradient(**{wrong: new(3, dtype=F32 if wrong == "dsink" else BF16)}) == NULL_POINTER


def test_sinks_of_a_float_gradient() -> None:
    def gradient(dtype: torch.dtype) -> int:
        q, statistics = new(1, 2, 4, 64, dtype=dtype), new(1, 2, 4, 8, dtype=F32)
        sink = new(2, dtype=F32)
        return First()(
            "FlashAttentionScoreGradV3", q, q, q, q, *[None] * 4, statistics, statistics, None, q,
            sink, None, None, None, 1.0, 1.0, 100, 100, 2, "BNSD", 0, 0, 1, q, q, q, new(0), sink,
        )  # fmt: skip

    assert gradient(BF16) == 0
    assert gradient(F32) == INVALID


def indexer(query: Tensor | None, indices: torch.dtype = I32, values: torch.dtype = BF16) -> int:
    return First()(
        "LightningIndexer", query, new(1, 9, 1, 128), new(1, 2, 64), None, None, None, "BSND",
        "BSND", 8, 3, 100, 100, True, new(1, 2, 1, 8, dtype=indices),
        new(1, 2, 1, 8, dtype=values),
    )  # fmt: skip


def test_tensors_of_the_indexer() -> None:
    query = new(1, 2, 64, 128)
    assert indexer(query) == 0
    assert indexer(None) == NO_TENSOR
    assert indexer(query, indices=F32) == INNER_NULL_POINTER
    assert indexer(query, values=F32) == INNER_NULL_POINTER


def test_outputs_of_the_indexers_gradient() -> None:
    q, k, w = new(1, 2, 64, 128), new(1, 9, 1, 128), new(1, 2, 64)

    def gradient(dq: Tensor) -> int:
        return First()(
            "LightningIndexerGrad", q, k, new(1, 2, 1, 8), new(1, 2, 1, 8, dtype=I32), w, None,
            None, 64, "BSND", 3, 100, 100, False, dq, k, w,
        )  # fmt: skip

    assert gradient(q) == 0
    assert gradient(q.float()) == INNER_NULL_POINTER
    assert gradient(new(1, 2, 64, 64)) == INNER_NULL_POINTER


def test_outputs_of_sparse_attention() -> None:
    q, k, rope = new(1, 2, 8, 512), new(1, 9, 1, 512), new(1, 2, 8, 64)

    def attention(out: Tensor, maximum: Any, lse: bool = True) -> int:
        return First()(
            "SparseFlashAttention", q, k, k, new(1, 2, 1, 8, dtype=I32), None, None, None, rope,
            new(1, 9, 1, 64), 1.0, 1, "BSND", "BSND", 3, 100, 100, 2, lse, out, maximum, maximum,
        )  # fmt: skip

    statistics = new(1, 1, 2, 8, dtype=F32)
    assert attention(q, statistics) == 0
    assert attention(q, None) == NO_TENSOR
    assert attention(q, None, lse=False) == 0
    assert attention(q.float(), statistics) == INNER_NULL_POINTER
    assert attention(q, statistics.bfloat16()) == INNER_NULL_POINTER


def test_sparse_attention_and_its_loss_need_ropes() -> None:
    """The gradient does not."""
    q, k, ropes = new(1, 2, 8, 512), new(1, 9, 1, 512), (new(1, 2, 8, 64), new(1, 9, 1, 64))
    indices, statistics = new(1, 2, 1, 8, dtype=I32), new(1, 1, 2, 8, dtype=F32)
    q_index, k_index, weights = new(1, 2, 8, 128), new(1, 9, 1, 128), new(1, 2, 8)

    def attention(*ropes: Any) -> int:
        return First()(
            "SparseFlashAttention", q, k, k, indices, None, None, None, *ropes, 1.0, 1, "BSND",
            "BSND", 3, 100, 100, 2, True, q, statistics, statistics,
        )  # fmt: skip

    def gradient(*ropes: Any) -> int:
        return First()(
            "SparseFlashAttentionGrad", q, k, k, indices, q, q, statistics, statistics, None, None,
            *ropes, 1.0, 1, "BSND", 3, 100, 100, False, q, k, k, *ropes,
        )  # fmt: skip

    def loss(*ropes: Any) -> int:
        return First()(
            "SparseLightningIndexerGradKLLoss", q, k, q_index, k_index, weights, indices,
            statistics, statistics, *ropes, None, None, 1.0, "BSND", 3, 100, 100, False,
            q_index, k_index, weights, new(1, dtype=F32),
        )  # fmt: skip

    for call, without in ((attention, TILING), (gradient, 0), (loss, TILING)):
        assert call(*ropes) == 0
        assert call(None, None) == without


def test_sparse_attention_has_no_statistics_of_pages() -> None:
    q, cache, rope = new(2, 8, 512), new(4, 16, 1, 512), new(4, 16, 1, 64)
    lengths, statistics = new(2, dtype=I32), new(1, 2, 8, dtype=F32)

    def attention(lse: bool) -> int:
        return First()(
            "SparseFlashAttention", q, cache, cache, new(2, 1, 8, dtype=I32),
            new(2, 2, dtype=I32), lengths, lengths, new(2, 8, 64), rope, 1.0, 1, "TND", "PA_BSND",
            3, 100, 100, 2, lse, q, statistics, statistics,
        )  # fmt: skip

    assert attention(False) == 0
    assert attention(True) == TILING


def test_sparse_attention_takes_the_key_for_a_missing_value() -> None:
    q, k = new(1, 2, 8, 512), new(1, 9, 1, 512)
    indices, statistics = new(1, 2, 1, 8, dtype=I32), new(1, 1, 2, 8, dtype=F32)
    ropes = (new(1, 2, 8, 64), new(1, 9, 1, 64))
    forward = First()(
        "SparseFlashAttention", q, k, None, indices, None, None, None, *ropes, 1.0, 1, "BSND",
        "BSND", 3, 100, 100, 2, True, q, statistics, statistics,
    )  # fmt: skip
    gradient = First()(
        "SparseFlashAttentionGrad", q, k, None, indices, q, q, statistics, statistics, None, None,
        *ropes, 1.0, 1, "BSND", 3, 100, 100, False, q, k, k, *ropes,
    )  # fmt: skip
    assert (forward, gradient) == (0, 0)


def test_outputs_of_the_sparse_gradient_and_of_the_loss() -> None:
    q, k = new(1, 2, 8, 512), new(1, 9, 1, 512)
    q_rope, k_rope, statistics = new(1, 2, 8, 64), new(1, 9, 1, 64), new(1, 1, 2, 8, dtype=F32)
    indices = new(1, 2, 1, 8, dtype=I32)

    def gradient(dq: Tensor) -> int:
        return First()(
            "SparseFlashAttentionGrad", q, k, k, indices, q, q, statistics, statistics, None, None,
            q_rope, k_rope, 1.0, 1, "BSND", 3, 100, 100, False, dq, k, k, q_rope, k_rope,
        )  # fmt: skip

    assert gradient(q) == 0
    assert gradient(q.float()) == INNER_NULL_POINTER
    q_index, k_index, weights = new(1, 2, 8, 128), new(1, 9, 1, 128), new(1, 2, 8)

    def loss(dtype: torch.dtype) -> int:
        return First()(
            "SparseLightningIndexerGradKLLoss", q, k, q_index, k_index, weights, indices,
            statistics, statistics, q_rope, k_rope, None, None, 1.0, "BSND", 3, 100, 100, False,
            q_index, k_index, weights, new(1, dtype=dtype),
        )  # fmt: skip

    assert loss(F32) == 0
    assert loss(BF16) == INNER_NULL_POINTER


def test_output_of_prompt_attention() -> None:
    q = new(1, 2, 4, 64)

    def prompt(out: torch.dtype) -> int:
        return First()(
            "PromptFlashAttentionV3", q, q, q, *[None] * 9, 2, 1.0, 100, 100, "BNSD", 2, 0, 2,
            new(1, 2, 4, 64, dtype=out),
        )  # fmt: skip

    assert prompt(BF16) == 0
    assert prompt(F32) == INNER_NULL_POINTER


@pytest.mark.parametrize("missing", range(5))
def test_missing_tensors_of_a_cache(missing: int) -> None:
    tensors = [new(3, 1, 32), new(2, 16, 1, 32), new(3, dtype=I32), new(3, 1, 32),
               new(2, 16, 1, 32)]  # fmt: skip

    def scatter(tensors: list[Any]) -> int:
        options = (None, None, None, "Norm", "None", None, None)
        return First()("ScatterPaKvCache", *tensors, *options)

    assert scatter(tensors) == 0
    given: list[Any] = list(tensors)
    given[missing] = None
    assert scatter(given) == INNER_NULL_POINTER


def test_packed_attention_without_lengths() -> None:
    """Which once ended the process."""
    q, statistics = new(4, 2, 128), new(4, 2, 8, dtype=F32)
    assert First()(
        "FlashAttentionVarLenScoreV2", q, q, q, None, None, None, None, None, None, None, None,
        None, 1.0, 1.0, 100, 100, 2, "TND", 0, 0, 1, statistics, statistics, new(0), q,
    ) == INVALID  # fmt: skip
