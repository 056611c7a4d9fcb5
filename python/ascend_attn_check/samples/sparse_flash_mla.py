"""Samples of sparse_flash_mla and its gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from ascend_attn_ops import reference
from ascend_attn_ops.reference.bounds.expected import (
    Expected,
)
from ascend_attn_ops.reference.bounds.sparse_flash_mla import expected_gradient
from ascend_attn_ops.reference.call import Outputs, Sample
from ascend_attn_ops.reference.operators.sparse_flash_mla import visible
from torch import Tensor

from .randomness import Random
from .record import Gradient, Operator
from .sparse import Pages, SparseCase, row_indices

LENGTHS = tuple(f"actual_seq_lengths_{x}" for x in ("query", "ori_kv", "cmp_kv"))


@dataclass(frozen=True)
class MlaCase:
    layout: str = "BSND"
    kind: str = "csa"  # or "swa", "hca"
    b: int = 2
    # Queries, original keys and compressed keys.
    s: tuple[int, int, int] = (9, 11, 5)  # BSND only
    lengths: tuple[tuple[int, ...], ...] | None = None
    tail: tuple[int, int, int] = (0, 0, 0)  # tokens after the last sequence: TND only
    residual: tuple[int, ...] | None = None
    ratio: int = 2
    heads: int = 4
    d: int = 16
    k: int = 3
    mode: int = 4
    cmp_mode: int = 3
    left: int = 3
    right: int = 0
    sink: bool = True
    pattern: str = "random"  # of the indices, see `indices`
    selection_heads: bool = True
    page: int = 0
    lse: bool = True

    @property
    def id(self) -> str:
        def join(lengths: tuple[int, ...]) -> str:
            return "+".join(map(str, lengths)) or "none"

        parts = [self.layout, self.kind]
        if self.layout == "BSND":
            parts += [f"B{self.b}", "S" + "x".join(map(str, self.s))]
        if self.lengths is not None:
            parts += ["L" + "x".join(map(join, self.lengths))]
        if any(self.tail):
            parts += ["tail" + "+".join(map(str, self.tail))]
        parts += [f"H{self.heads}-D{self.d}-mode{self.mode}"]
        parts += [f"win{self.left}+{self.right}"] if self.mode == 4 else []
        if self.kind != "swa":
            parts += [f"r{self.ratio}-cmp{self.cmp_mode}"]
        parts += [f"K{self.k}"] if self.kind == "csa" else []
        parts += [] if self.residual is None else [f"residual{join(self.residual)}"]
        parts += [] if self.sink else ["nosink"]
        parts += [self.pattern] if self.pattern != "random" else []
        parts += [] if self.selection_heads else ["noheads"]
        parts += [f"page{self.page}"] if self.page else []
        parts += [] if self.lse else ["nolse"]
        return "-".join(parts)

    @property
    def sides(self) -> int:
        return 2 if self.kind == "swa" else 3

    def keys(self, side: int) -> SparseCase:
        """Returns the queries beside one kind of keys, as a case of the sparse operators."""
        lengths = None if self.lengths is None else (self.lengths[0], self.lengths[side])
        return SparseCase(
            layout=self.layout, b=self.b, s=(self.s[0], self.s[side]), lengths=lengths,
            tail=(self.tail[0], self.tail[side]), page=self.page,
        )  # fmt: skip

    def length_options(self) -> dict[str, Tensor | None]:
        lists = [self.keys(1).length_list(0), *(self.keys(x).length_list(1) for x in (1, 2))]
        return {
            name: None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
            for name, lengths in list(zip(LENGTHS, lists, strict=True))[: self.sides]
        }

    def compressed_counts(self) -> tuple[int, ...]:
        return (self.s[2],) * self.b if self.lengths is None else self.lengths[2]

    def query_counts(self) -> tuple[int, ...]:
        return (self.s[0],) * self.b if self.lengths is None else self.lengths[0]


_TND = MlaCase(layout="TND", lengths=((7, 0, 3, 1), (7, 2, 3, 6), (3, 1, 1, 3)))
_WINDOW = MlaCase(kind="swa")
_WHOLE = MlaCase(kind="hca")

# Within the limits of a device.
DEVICE = MlaCase(b=1, s=(20, 20, 5), heads=8, d=512, ratio=4, k=512, left=127)
DEVICE_CASES = [
    DEVICE,
    replace(DEVICE, kind="swa", ratio=1, s=(140, 140, 0)),
    replace(DEVICE, kind="hca", ratio=128, s=(139, 139, 1), heads=2),
    replace(DEVICE, b=2, s=(3, 3, 0)),  # shorter than cmp_ratio
    replace(DEVICE, layout="TND", lengths=((9, 0, 13), (9, 2, 13), (2, 0, 3)), k=1024),
    replace(DEVICE, layout="TND", kind="hca", ratio=128, lengths=((5, 1), (133, 9), (1, 0))),
    replace(DEVICE, layout="TND", kind="swa", ratio=1, lengths=((5, 4), (12, 4), (0, 0))),
]

CASES = [
    MlaCase(),
    _WINDOW,
    _WHOLE,
    replace(_WINDOW, s=(9, 12, 0), left=-1, right=-1, sink=False),
    replace(_WINDOW, s=(5, 40, 0), left=17, right=2, heads=3, d=17),
    replace(_WINDOW, s=(9, 9, 0), left=0),
    replace(_WINDOW, s=(6, 9, 0), mode=3, left=0),
    replace(_WINDOW, s=(9, 6, 0), mode=0, left=0),
    replace(_WINDOW, s=(9, 6, 0)),  # rows before all keys
    replace(_WHOLE, s=(19, 19, 6), ratio=3, heads=8, d=24),
    replace(_WHOLE, s=(9, 9, 9), ratio=1, sink=False, mode=3),
    replace(_WHOLE, s=(8, 5, 2), cmp_mode=0, mode=0, left=5),
    replace(_WHOLE, s=(8, 5, 4), residual=(1, 0)),  # rows that see compressed keys alone
    replace(_WHOLE, s=(8, 5, 4), residual=(1, 0), mode=0),
    replace(_WHOLE, s=(3, 6, 12), ratio=4, residual=(3, 0), left=4),
    replace(_WHOLE, b=1, s=(2, 900, 450), heads=3, left=500),  # divided into parts
    MlaCase(b=1, s=(2, 300, 150), heads=2, left=290, k=140),
    MlaCase(s=(63, 63, 31), heads=8, d=32, k=12, left=15, sink=False),
    MlaCase(s=(33, 33, 8), ratio=4, k=3, heads=64, d=8),
    MlaCase(s=(21, 21, 5), ratio=4, k=7, mode=3, pattern="padded"),
    MlaCase(s=(9, 11, 5), k=5, pattern="hole"),
    MlaCase(s=(9, 11, 5), k=4, pattern="duplicates", sink=False),
    MlaCase(s=(9, 11, 5), k=4, pattern="future", selection_heads=False),
    MlaCase(s=(9, 11, 5), k=8, pattern="unread"),
    MlaCase(s=(9, 11, 5), k=9, cmp_mode=0, mode=0, pattern="first"),
    MlaCase(s=(3, 3, 0), ratio=4),
    MlaCase(s=(4, 0, 0)),
    MlaCase(s=(0, 6, 3)),
    MlaCase(b=0),
    MlaCase(d=0),
    MlaCase(b=3, s=(9, 12, 5), lengths=((9, 4, 0), (12, 5, 3), (5, 2, 1)), residual=(0, 1, 1)),
    MlaCase(b=2, s=(9, 12, 6), lengths=((9, 4), (12, 5), (6, 2)), selection_heads=False),
    _TND,
    replace(_TND, kind="swa", tail=(2, 3, 0)),
    replace(_TND, kind="hca", tail=(1, 0, 4), heads=3),
    replace(_TND, tail=(2, 3, 1), pattern="padded", residual=(1, 0, 1, 0), selection_heads=False),
    replace(_TND, mode=0, cmp_mode=0, sink=False, tail=(2, 0, 0)),
    replace(_TND, lengths=((5, 1), (3, 2), (1, 1))),  # rows before all keys
    replace(_TND, lengths=((0, 0), (0, 0), (0, 0)), tail=(3, 4, 2)),
    replace(_TND, lengths=((), (), ())),
    *DEVICE_CASES,
]

PAGED_CASES = [
    MlaCase(s=(9, 9, 4), lengths=((9, 5), (9, 6), (4, 3)), page=16),
    replace(_WINDOW, s=(1, 60, 0), lengths=((1, 1), (60, 33), (0, 0)), page=16, left=40, lse=False),
    replace(
        _WHOLE, s=(2, 40, 70), lengths=((2, 1), (33, 40), (70, 9)), residual=(1, 0), page=7, left=9
    ),
    MlaCase(
        s=(2, 40, 70), lengths=((2, 1), (33, 40), (70, 9)), residual=(1, 0), page=32, k=20,
        ratio=4, lse=False,
    ),
    MlaCase(b=0, lengths=((), (), ()), page=16),
    replace(_TND, page=5, pattern="future"),
    replace(_TND, page=16, tail=(2, 0, 0), sink=False, kind="hca"),
    replace(_TND, page=16, mode=0, cmp_mode=0, selection_heads=False),
    replace(DEVICE, layout="TND", lengths=((1, 3), (140, 41), (35, 10)), page=16, lse=False),
]  # fmt: skip


def build(case: MlaCase, dtype: torch.dtype) -> Sample:
    random = Random(case.id, dtype)
    sides = range(1, case.sides)
    caches = {side: random.normal(*case.keys(side).tokens(1), 1, case.d) for side in sides}
    paged: dict[str, Any] = {}
    if case.page:
        paged["layout_kv"] = "PA_BSND"
        for side, name in zip(sides, ("ori_block_table", "cmp_block_table"), strict=False):
            of_keys = case.keys(side)
            pages = Pages.draw(of_keys, random)
            caches[side] = pages.cache(of_keys, caches[side])
            paged[name] = pages.table
    inputs = {
        "query": random.normal(*case.keys(1).tokens(0), case.heads, case.d),
        "ori_kv": caches[1],
        "cmp_kv": caches.get(2),
        "cmp_sparse_indices": None,
    }
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    residual = None if case.residual is None else torch.tensor(case.residual, dtype=torch.int32)
    options = {
        "scale_value": max(case.d, 1) ** -0.5,
        "sink": random.normal(case.heads).to(statistics) if case.sink else None,
        **case.length_options(),
        "cmp_residual_kv": residual,
        "cmp_ratio": case.ratio,
        "ori_mask_mode": case.mode,
        "cmp_mask_mode": case.cmp_mode,
        "ori_win_left": case.left,
        "ori_win_right": case.right,
        "layout": case.layout,
        **paged,
        **({} if case.lse else {"return_softmax_lse": False}),
    }
    sample = Sample("sparse_flash_mla", f"{case.id}-{dtype}", inputs, options)
    if case.kind == "csa":
        sample = sample.replace(cmp_sparse_indices=indices(case, sample, random))
    return sample


def indices(case: MlaCase, sample: Sample, random: Random) -> Tensor:
    """(B,S1,1,K) or (T1,1,K), or as the case says without the axis of heads: compressed keys that
    each query sees, in random order, padded by -1. The patterns are those of `sparse.indices`."""
    tokens = sample.inputs["query"].shape[:-2]
    result = torch.full((tokens.numel(), case.k), -1, dtype=torch.int32)
    counts = [
        keys
        for queries, keys in zip(case.query_counts(), case.compressed_counts(), strict=True)
        for _ in range(queries)
    ]
    rows = visible(sample.exact_arguments()) if tokens.numel() else iter(())
    for row, keys in zip(rows, counts, strict=False):
        visible_keys = len(row.slots)
        chosen = row_indices(case.pattern, case.k, row.token, visible_keys, keys, random)
        result[row.token] = torch.tensor(chosen, dtype=torch.int32)
    return result.view(*tokens, *([1] if case.selection_heads else []), case.k)


def build_grad(case: MlaCase, dtype: torch.dtype) -> Sample:
    forward = build(case, dtype)
    outputs = forward.call(reference)
    return gradient_call(forward, outputs, Random(case.id, dtype).normal(*outputs[0].shape))


def gradient_call(forward: Sample, outputs: Outputs, d_out: Tensor) -> Sample:
    out, softmax_lse = outputs
    return forward.of_gradient(d_out=d_out, out=out, softmax_lse=softmax_lse)


def backward(sample: Sample, outputs: Outputs, d_out: Tensor) -> Outputs:
    return gradient_call(sample, outputs, d_out).call(torch.ops.ascend)[:4]


def expected_backward(sample: Sample, outputs: Outputs, d_out: Tensor) -> list[Expected]:
    return expected_gradient(gradient_call(sample, outputs, d_out))[:4]


def on_device(case: MlaCase) -> bool:
    return case.d == DEVICE.d


SPARSE_FLASH_MLA = Operator(
    "sparse_flash_mla",
    CASES + PAGED_CASES,
    build,
    Gradient(
        ("query", "ori_kv", "cmp_kv", "sink"),
        ("out",),
        backward,
        expected=expected_backward,
        takes=lambda case: not case.page,
    ),
    on_device=on_device,
    takes_dtensors=False,
)

SPARSE_FLASH_MLA_GRAD = Operator(
    "sparse_flash_mla_grad",
    CASES,
    build_grad,
    on_device=on_device,
    takes_dtensors=False,
)

OPERATORS = [SPARSE_FLASH_MLA, SPARSE_FLASH_MLA_GRAD]
