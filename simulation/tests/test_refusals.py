"""The calls that CANN's compiled host code refuses, with its status: each class of them."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from cann_simulator.control import library
from support.simulated_npu import once
from torch import Tensor

pytestmark = once

NO_TENSOR, NULL_POINTER, INVALID, TILING, INNER_NULL_POINTER = -1, 161001, 161002, 561002, 561103
F32, F16, BF16, I32 = torch.float32, torch.float16, torch.bfloat16, torch.int32
Arguments = dict[Any, Any]


def new(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def rest(*values: Any) -> Arguments:
    """Arguments that no test changes."""
    return {object(): x for x in values}


def named(names: str, value: Any) -> Arguments:
    return dict.fromkeys(names.split(), value)


NONE = [None] * 13
DENSE, STATISTICS = new(1, 2, 4, 64), new(1, 2, 4, 8, dtype=F32)
PACK, ROPE, PACK_STATISTICS = new(4, 2, 64), new(4, 2, 32), new(4, 2, 8, dtype=F32)
MASK, SINK = new(4, 4, dtype=torch.bool), new(2, dtype=F32)
NUMBERS, LENGTHS = (1.0, 1.0, 100, 100), ((4,), (4,))  # scale, keep_prob, pre and next tokens
QUERY, KEY = new(1, 2, 8, 512), new(1, 9, 1, 512)
QUERY_ROPE, KEY_ROPE = new(1, 2, 8, 64), new(1, 9, 1, 64)
SLOTS, SPARSE_STATISTICS = new(1, 2, 1, 8, dtype=I32), new(1, 1, 2, 8, dtype=F32)
INDEX_QUERY, INDEX_KEY, WEIGHTS = new(1, 2, 64, 128), new(1, 9, 1, 128), new(1, 2, 64)
LOSS_QUERY, LOSS_WEIGHTS = new(1, 2, 8, 128), new(1, 2, 8)

# Calls that are not refused: all arguments of a function in their order.
CALLS: dict[str, Arguments] = {
    "AttentionUpdate": {
        "lse": [new(8, dtype=F32)] * 2, "outs": [new(8, 64)] * 2, "kind": 0, "out": new(8, 64),
        "lse_out": None,
    },
    "FlashAttentionScoreV2": {
        **rest(DENSE, DENSE, DENSE, *NONE[:7], *NUMBERS, 2, "BNSD", 0, 0, 1),
        **named("max sum", STATISTICS), **rest(new(0)), "out": DENSE,
    },
    "FlashAttentionScoreGradV2": {
        **named("query key value dy", DENSE), "pse": None, **rest(*NONE[:3]),
        **named("max sum", STATISTICS), **rest(None), "out": DENSE, **rest(*NONE[:3], *NUMBERS),
        "heads": 2, "layout": "BNSD", **rest(0, 0, 1), **named("dq dk dv", DENSE), "dpse": new(0),
    },
    "FlashAttentionScoreGradV3": {
        **named("query key value dy", DENSE), **rest(*NONE[:4], STATISTICS, STATISTICS, None),
        "out": DENSE, "sink": SINK, **rest(*NONE[:3], *NUMBERS, 2, "BNSD", 0, 0, 1),
        **named("dq dk dv", DENSE), **rest(new(0)), "dsink": SINK,
    },
    "FlashAttentionVarLenScoreV2": {
        **rest(PACK, PACK, PACK, *NONE[:5]), **named("queries keys", (4,)),
        **rest(None, None, *NUMBERS, 2, "TND", 0, 0, 1, PACK_STATISTICS, PACK_STATISTICS, new(0),
               PACK),
    },
    "FlashAttentionVarLenScoreV3": {
        "query": PACK, "query_rope": ROPE, "key": PACK, "key_rope": ROPE, "value": PACK,
        **rest(*NONE[:3], MASK, None, *LENGTHS, None, None, *NUMBERS, 2, "TND", 0, 0, 1,
               PACK_STATISTICS, PACK_STATISTICS, new(0)), "out": PACK,
    },
    "FlashAttentionVarLenScoreV5": {
        "query": PACK, "query_rope": ROPE, "key": PACK, "key_rope": ROPE, "value": PACK,
        "pse": None, "drop": None, **rest(None), "mask": MASK, **rest(None), "prefix": None,
        **rest(*LENGTHS, None, None, 1.0), "keep": 1.0, **rest(100, 100, 2, "TND", 0), "mode": 0,
        **rest(1, "", PACK_STATISTICS, PACK_STATISTICS, new(0)), "out": PACK,
    },
    "FlashAttentionUnpaddingScoreGradV3": {
        "query": PACK, "query_rope": ROPE, "key": PACK, "key_rope": ROPE,
        **named("value dy", PACK), **rest(*NONE[:3], MASK, PACK_STATISTICS, PACK_STATISTICS, None),
        "out": PACK, **rest(None, *LENGTHS, None, None, *NUMBERS, 2, "TND", 0, 0, 1),
        "dq": PACK, "dq_rope": ROPE, "dk": PACK, "dk_rope": ROPE, "dv": PACK, **rest(new(0)),
    },
    "FlashAttentionUnpaddingScoreGradV5": {
        **rest(PACK, ROPE, PACK, ROPE, PACK, PACK, *NONE[:3], MASK, PACK_STATISTICS,
               PACK_STATISTICS, None, PACK, SINK, None, *LENGTHS, None, None, *NUMBERS, 2,
               "TND", 0, 0, 1, "", PACK),
        "dq_rope": ROPE, **rest(PACK), "dk_rope": ROPE, **rest(PACK, new(0)), "dsink": SINK,
    },
    "FusedInferAttentionScoreV4": {
        "query": new(2, 4, 3, 64), **named("key value", [new(2, 2, 9, 64)]), **rest(None, None),
        **named("queries keys", None), **rest(*NONE[:7]), "table": None, **rest(*NONE[:13]),
        "sink": None, "heads": 4, **rest(1.0, 100, 100), "layout": "BNSD",
        **rest(2, 0, 0, 16, 0), "flag": True, **rest(0, 0, 0), "out": new(2, 4, 3, 64),
        "lse": new(2, 4, 3, 1, dtype=F32),
    },
    "LightningIndexer": {
        "query": INDEX_QUERY, **rest(INDEX_KEY, WEIGHTS, *NONE[:3], "BSND", "BSND", 8, 3, 100, 100,
                                     True), "indices": SLOTS, "values": new(1, 2, 1, 8),
    },
    "LightningIndexerGrad": {
        **rest(INDEX_QUERY, INDEX_KEY, new(1, 2, 1, 8), SLOTS, WEIGHTS, None, None, 64, "BSND", 3,
               100, 100, False), "dq": INDEX_QUERY, **rest(INDEX_KEY, WEIGHTS),
    },
    "PromptFlashAttentionV3": {
        **rest(DENSE, DENSE, DENSE, *NONE[:9], 2, 1.0, 100, 100, "BNSD", 2, 0, 2), "out": DENSE,
    },
    "ScatterPaKvCache": {
        "key": new(3, 1, 32), "key_cache": new(2, 16, 1, 32), "slots": new(3, dtype=I32),
        "value": new(3, 1, 32), "value_cache": new(2, 16, 1, 32),
        **rest(None, None, None, "Norm", "None", None, None),
    },
    "SparseFlashAttention": {
        "query": QUERY, **named("key value", KEY), "slots": SLOTS,
        **named("table query_lengths key_lengths", None), "query_rope": QUERY_ROPE,
        "key_rope": KEY_ROPE, **rest(1.0, 1), **named("layout key_layout", "BSND"),
        **rest(3, 100, 100, 2), "flag": True, "out": QUERY, **named("max sum", SPARSE_STATISTICS),
    },
    "SparseFlashAttentionGrad": {
        **rest(QUERY, KEY), "value": KEY, **rest(SLOTS, QUERY, QUERY, SPARSE_STATISTICS,
                                                 SPARSE_STATISTICS, None, None),
        "query_rope": QUERY_ROPE, "key_rope": KEY_ROPE, **rest(1.0, 1, "BSND", 3, 100, 100, False),
        "dq": QUERY, **rest(KEY, KEY), "dq_rope": QUERY_ROPE, "dk_rope": KEY_ROPE,
    },
    "SparseLightningIndexerGradKLLoss": {
        **rest(QUERY, KEY, LOSS_QUERY, INDEX_KEY, LOSS_WEIGHTS, SLOTS, SPARSE_STATISTICS,
               SPARSE_STATISTICS), "query_rope": QUERY_ROPE, "key_rope": KEY_ROPE,
        **rest(None, None, 1.0, "BSND", 3, 100, 100, False, LOSS_QUERY, INDEX_KEY, LOSS_WEIGHTS),
        "loss": new(1, dtype=F32),
    },
}  # fmt: skip


def of_dtype(function: str, dtype: torch.dtype) -> Arguments:
    """Returns all tensors of bfloat16, which have names, in another dtype."""
    return {
        name: x.to(dtype)
        for name, x in CALLS[function].items()
        if isinstance(name, str) and isinstance(x, Tensor) and x.dtype == BF16 and x.numel()
    }


def many_heads(layout: str, b: int, n: int, value: int = 128) -> Arguments:
    def tensor(d: int) -> Tensor:
        axes = {"B": b, "S": 1, "N": n, "D": d, "H": n * d}
        return new(*(axes[axis] for axis in layout))

    statistics = named("max sum", new(1, n, 1, 8, dtype=F32))
    tensors = named("query key dq dk", tensor(192)) | named("value dy out dv", tensor(value))
    return {"layout": layout, "heads": n, **statistics, **tensors}


PSE = new(1, 2, 4, 4)
SCORE_GRAD, ROPES, SPARSE = (
    "FlashAttentionScoreGradV2", "FlashAttentionVarLenScoreV5", "SparseFlashAttention",
)  # fmt: skip
PAGES = {
    "query": new(2, 8, 512), **named("key value", new(4, 16, 1, 512)),
    "slots": new(2, 1, 8, dtype=I32), "table": new(2, 2, dtype=I32),
    **named("query_lengths key_lengths", new(2, dtype=I32)), "query_rope": new(2, 8, 64),
    "key_rope": new(4, 16, 1, 64), "layout": "TND", "key_layout": "PA_BSND", "out": new(2, 8, 512),
    **named("max sum", new(1, 2, 8, dtype=F32)),
}  # fmt: skip
INFER, INFER_V3 = "FusedInferAttentionScoreV4", "FusedInferAttentionScoreV3"
without_sink = list(CALLS[INFER].items())
del without_sink[-3], without_sink[27:29]  # and without what quantises the query
CALLS[INFER_V3] = dict(without_sink)
INFER_PACK = {
    "query": new(5, 4, 64), **named("key value", [new(7, 2, 64)]), "layout": "TND",
    "queries": (2, 5), "keys": (3, 7), "out": new(5, 4, 64), "lse": new(5, 4, 1, dtype=F32),
}  # fmt: skip
INFER_PAGES = {
    **named("key value", [new(8, 16, 128)]), "keys": (20, 3), "table": new(2, 2, dtype=I32),
}  # fmt: skip
INFER_THREE = {
    "query": new(3, 4, 3, 64), **named("key value", [new(3, 2, 9, 64)]), "out": new(3, 4, 3, 64),
    "lse": new(3, 4, 3, 1, dtype=F32),
}  # fmt: skip
NO_ROPES = named("query_rope key_rope", None)
STATUSES: list[tuple[str, Arguments, int]] = [
    *((function, {}, 0) for function in CALLS),
    *(("AttentionUpdate", {"kind": x}, INVALID) for x in (-1, 3, 7, 9)),
    ("AttentionUpdate", {"kind": 1, "lse_out": new(8, dtype=F32)}, 0),
    ("AttentionUpdate", {"kind": 0, "lse_out": new(8, dtype=F32)}, INVALID),
    ("AttentionUpdate", {"kind": 1}, NULL_POINTER),
    ("AttentionUpdate", {"kind": 1, "lse_out": new(8)}, INNER_NULL_POINTER),
    ("AttentionUpdate", {"kind": 1, "lse_out": new(9, dtype=F32)}, INNER_NULL_POINTER),
    ("AttentionUpdate", {"out": new(8, 64, dtype=F32)}, INNER_NULL_POINTER),
    ("AttentionUpdate", {"out": new(8, 32)}, INNER_NULL_POINTER),
    ("AttentionUpdate", {"outs": [new(8, 60)] * 2, "out": new(8, 60)}, INVALID),
    *(
        ("AttentionUpdate", {"lse": [new(8, dtype=F32)] * n, "outs": [new(8, 64)] * n}, status)
        for n, status in ((128, 0), (129, INVALID))
    ),
    ("FlashAttentionScoreV2", {"out": DENSE.float()}, NULL_POINTER),
    ("FlashAttentionScoreV2", named("max sum", STATISTICS.bfloat16()), NULL_POINTER),
    (SCORE_GRAD, {"dq": DENSE.float()}, NULL_POINTER),
    (SCORE_GRAD, {"dq": new(1, 2, 4, 32)}, NULL_POINTER),
    (SCORE_GRAD, {"pse": PSE, "dpse": PSE}, 0),
    (SCORE_GRAD, {"pse": PSE, "dpse": PSE.float()}, NULL_POINTER),
    (SCORE_GRAD, {"pse": PSE, "dpse": new(1, 2, 4, 3)}, NULL_POINTER),
    (SCORE_GRAD, many_heads("SBH", 1, 256), NULL_POINTER),
    (SCORE_GRAD, many_heads("SBH", 2, 128), NULL_POINTER),
    (SCORE_GRAD, many_heads("SBH", 1, 255), 0),
    (SCORE_GRAD, many_heads("SBH", 1, 256, value=192), 0),
    (SCORE_GRAD, many_heads("BSH", 1, 256), NULL_POINTER),
    (SCORE_GRAD, many_heads("BSH", 2, 128), 0),
    (SCORE_GRAD, many_heads("BSND", 1, 256), NULL_POINTER),
    (SCORE_GRAD, many_heads("BNSD", 1, 256), 0),
    ("FlashAttentionScoreGradV3", of_dtype("FlashAttentionScoreGradV3", F32), INVALID),
    # Which once ended the process.
    ("FlashAttentionVarLenScoreV2", named("queries keys", None), INVALID),
    *(
        (function, of_dtype(function, dtype), INVALID)
        for function in ("FlashAttentionVarLenScoreV3", "FlashAttentionUnpaddingScoreGradV3")
        for dtype in (F16, F32)
    ),
    # The host pads no head beside a rope, and combines ropes with a mask alone.
    *((ROPES, {name: None}, NULL_POINTER) for name in ("mask", "query_rope", "key_rope")),
    (ROPES, {"pse": new(2 * 4 * 4)}, INVALID),
    (ROPES, {"drop": new(4, dtype=torch.uint8), "keep": 0.5}, INVALID),
    (ROPES, {"mode": 6, "prefix": (4,)}, INVALID),
    (ROPES, named("query key value out", new(4, 2, 72)), INVALID),
    (ROPES, named("query_rope key_rope", new(4, 2, 80)), INVALID),
    (ROPES, named("value out", new(4, 2, 32)), INVALID),
    *(
        ("FlashAttentionUnpaddingScoreGradV5", {name: new(3, dtype=dtype)}, NULL_POINTER)
        for name, dtype in (("dq_rope", BF16), ("dk_rope", BF16), ("dsink", F32))
    ),
    *((INFER, {**x, "sink": new(4)}, 0) for x in ({}, INFER_PACK, INFER_PAGES)),
    *(
        (INFER, {**x, "flag": False, "lse": new(0, dtype=F32)}, 0)
        for x in ({}, INFER_PACK, INFER_PAGES)
    ),
    *((x, {"out": new(2, 3, 4, 64)}, INVALID) for x in (INFER, INFER_V3)),
    (INFER, {"out": new(2, 4, 3, 64, dtype=F16)}, INVALID),
    (INFER, {"out": new(2, 4, 3, 64, dtype=torch.int8)}, INVALID),
    (INFER, {"out": new(2, 3, 4, 32), "layout": "BNSD_BSND"}, INVALID),
    (INFER, {"lse": None}, INVALID),
    (INFER, {"lse": new(2, 4, 3, 1)}, INVALID),
    (INFER, {"lse": new(2, 4, 3, dtype=F32)}, INVALID),
    (INFER, {"sink": new(4, dtype=F32)}, INVALID),
    (INFER, {"sink": new(2)}, INVALID),
    *((x, {"heads": 3}, INVALID) for x in (INFER, INFER_V3)),
    (INFER, INFER_PACK, 0),
    (INFER, {**INFER_PACK, "queries": (2, 4)}, INVALID),
    (INFER, {**INFER_PACK, "queries": (5, 2)}, INVALID),
    (INFER, {**INFER_PACK, "queries": None}, INVALID),
    (INFER, {**INFER_PACK, "keys": (3, 5)}, INVALID),
    (INFER, {**INFER_PACK, "keys": (7,)}, INVALID),
    (INFER, {**INFER_PACK, "lse": new(4, 5, 1, dtype=F32)}, INVALID),
    (INFER, INFER_PAGES, 0),
    (INFER, {**INFER_PAGES, "keys": None}, INVALID),
    (INFER, {**INFER_THREE, "keys": (9, 4, 1, 7)}, 0),
    (INFER, {**INFER_THREE, "keys": (9,)}, 0),
    (INFER, {**INFER_THREE, "keys": (9, 4)}, INVALID),
    ("LightningIndexer", {"query": None}, NO_TENSOR),
    ("LightningIndexer", {"indices": SLOTS.float()}, INNER_NULL_POINTER),
    ("LightningIndexer", {"values": new(1, 2, 1, 8, dtype=F32)}, INNER_NULL_POINTER),
    ("LightningIndexerGrad", {"dq": INDEX_QUERY.float()}, INNER_NULL_POINTER),
    ("LightningIndexerGrad", {"dq": new(1, 2, 64, 64)}, INNER_NULL_POINTER),
    ("PromptFlashAttentionV3", {"out": DENSE.float()}, INNER_NULL_POINTER),
    *(
        ("ScatterPaKvCache", {name: None}, INNER_NULL_POINTER)
        for name in ("key", "key_cache", "slots", "value", "value_cache")
    ),
    (SPARSE, named("max sum", None), NO_TENSOR),
    (SPARSE, {**named("max sum", None), "flag": False}, 0),
    (SPARSE, {"out": QUERY.float()}, INNER_NULL_POINTER),
    (SPARSE, named("max sum", SPARSE_STATISTICS.bfloat16()), INNER_NULL_POINTER),
    (SPARSE, {"value": None}, 0),  # the key
    (SPARSE, {**PAGES, "flag": False}, 0),
    (SPARSE, PAGES, TILING),
    (SPARSE, NO_ROPES, TILING),
    ("SparseLightningIndexerGradKLLoss", NO_ROPES, TILING),
    ("SparseLightningIndexerGradKLLoss", {"loss": new(1)}, INNER_NULL_POINTER),
    ("SparseFlashAttentionGrad", NO_ROPES | named("dq_rope dk_rope", None), 0),
    ("SparseFlashAttentionGrad", {"value": None}, 0),
    ("SparseFlashAttentionGrad", {"dq": QUERY.float()}, INNER_NULL_POINTER),
]


# The C interface: no wrapper of torch_npu's checks its calls before.
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


def status_of(function: str, changes: Arguments) -> int:
    assert changes.keys() <= CALLS[function].keys()
    given = (CALLS[function] | changes).values()
    phase = getattr(library(), f"aclnn{function}GetWorkspaceSize")
    results = ctypes.byref(ctypes.c_uint64()), ctypes.byref(ctypes.c_void_p())
    return int(phase(*map(argument, given), *results))


@pytest.mark.parametrize(
    ("function", "changes", "status"), STATUSES,
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, dict) else str(x),
)  # fmt: skip
def test_status(function: str, changes: Arguments, status: int) -> None:
    assert status_of(function, changes) == status


def test_the_deterministic_gradient_takes_smaller_values() -> None:
    call = (SCORE_GRAD, many_heads("BSND", 1, 256))
    runtime, switch = ctypes.CDLL("libascendcl.so"), 0
    torch.npu.synchronize()
    runtime.aclrtCtxSetSysParamOpt(switch, ctypes.c_int64(1))
    try:
        assert status_of(*call) == 0
    finally:
        runtime.aclrtCtxSetSysParamOpt(switch, ctypes.c_int64(0))
    assert status_of(*call) == NULL_POINTER
