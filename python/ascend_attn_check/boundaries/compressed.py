"""Both sides of each rule of the operators for compressed keys, with the text of the error.

A table for each source of the rules, all of CANN 9.1 on A2 and A3: what CANN's code checks, what
its documents say, and what this library alone asks for, within both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .rule import Rule
from .sparse import HALF, Arguments, meta

FLOAT = torch.float32
RATIOS = {"swa": 1, "csa": 4, "hca": 128}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call in layout BSND: S1 = S2 tokens, and as many keys as are complete.

    A row sees at most one compressed key, and so selects as many as the device reads.
    """

    kind: str = "csa"  # of sparse_flash_mla; or "swa", "hca"
    b: int = 1
    s: int = 7
    keys: int = 1
    n: int = 8
    n_index: int = 8
    d_index: int = 128
    d: int = 512
    k: int = 512
    weights: torch.dtype = FLOAT
    sink: bool = True
    page: int = 0
    residual: bool = False  # given: the keys need not be those of the queries
    options: Arguments = field(default_factory=dict)

    def counts(self) -> Tensor:
        return meta(self.b, dtype=torch.int32)

    def selection(self) -> Tensor:
        return meta(self.b, self.s, 1, self.k, dtype=torch.int32)


def sparse_flash_mla(x: Sizes) -> Arguments:
    keys = [("ori_kv", x.s)] + ([] if x.kind == "swa" else [("cmp_kv", x.keys)])
    tensors = {
        name: meta(x.b, x.page, 1, x.d) if x.page else meta(x.b, count, 1, x.d)
        for name, count in keys
    }
    pages: Arguments = {"layout_kv": "PA_BSND"} if x.page else {}
    for name in tensors if x.page else ():
        pages[name.replace("_kv", "_block_table")] = meta(x.b, 1, dtype=torch.int32)
        pages[f"actual_seq_lengths_{name}"] = x.counts()
    if x.page:
        pages["cmp_residual_kv"] = x.counts()
    return {
        "query": meta(x.b, x.s, x.n, x.d),
        **tensors,
        **({"cmp_sparse_indices": x.selection()} if x.kind == "csa" else {}),
        "scale_value": 0.1,
        "sink": meta(x.n, dtype=FLOAT) if x.sink else None,
        "cmp_ratio": RATIOS[x.kind],
        **pages,
    }


def sparse_flash_mla_grad(x: Sizes) -> Arguments:
    out, lse = meta(x.b, x.s, x.n, x.d), meta(x.b, 1, x.s, x.n, dtype=FLOAT)
    optional = {"cmp_kv": None, "cmp_sparse_indices": None}
    return {**optional, **sparse_flash_mla(x), "d_out": out, "out": out, "softmax_lse": lse}


def lightning_indexer(x: Sizes) -> Arguments:
    return {
        "query": meta(x.b, x.s, x.n_index, x.d_index),
        "key": meta(x.b, x.keys, 1, x.d_index),
        "weights": meta(x.b, x.s, x.n_index, dtype=x.weights),
        "sparse_count": x.k,
        "cmp_ratio": 4,
        **({"cmp_residual_key": x.counts()} if x.residual else {}),
    }


def sparse_lightning_indexer_kl_loss_grad(x: Sizes) -> Arguments:
    indexer = lightning_indexer(x)
    del indexer["sparse_count"]
    indices = x.selection()
    return {
        "query_index": indexer.pop("query"),
        "key_index": indexer.pop("key"),
        "sparse_indices": indices,
        "attn_softmax_l1_norm": meta(*indices.shape, dtype=FLOAT),
        **indexer,
    }


MAKERS = {
    make.__name__: make
    for make in (
        sparse_flash_mla,
        sparse_flash_mla_grad,
        lightning_indexer,
        sparse_lightning_indexer_kl_loss_grad,
    )
}
MLA, MLAG, LI, KLG = MAKERS


def having(**options: Any) -> Sizes:
    return Sizes(options=options)


def of_ratio(ratio: int) -> Sizes:
    return Sizes(residual=True, options={"cmp_ratio": ratio})


def of_kind(kind: str, ratio: int | None = None) -> Sizes:
    ratio, tokens = ratio or RATIOS[kind], 130 if kind == "hca" else 7
    return Sizes(kind=kind, s=tokens, keys=tokens // ratio, options={"cmp_ratio": ratio})


# An operator, what a device takes, what it refuses, what the error expects and what it got.
Row = tuple[str, Sizes, Sizes, str, object]

ATTENTION = (MLA, MLAG)
TOKENS = {MLA: "ori_kv", MLAG: "ori_kv", LI: "key", KLG: "key_index"}
HEADS = "query: expected N1 (query heads) to be one of 1, 2, 4, 8, 16, 32, 64, 128"
SIZE = "query: expected D (head size without rope) to be 512"
KIND = "cmp_ratio: expected 1 without cmp_kv, 4 with cmp_sparse_indices and 128 without them"
K = "expected K (selected keys per token) to be one of 512, 1024"
SINK = "sink: expected a tensor, as the device knows no attention without a sink"
RATIO = "cmp_ratio: expected cmp_ratio (tokens per key) to be one of 1, 4, 128"
PAGE = "expected block_size (rows per block of the cache) to be a multiple of 16 in 16..1024"
INDEXER_HEADS = "expected Nidx (query heads of the indexer) to be"
ORI_MODE = "ori_mask_mode: expected ori_mask_mode (mask of the original keys) to be 4"
CMP_MODE = "cmp_mask_mode: expected cmp_mask_mode (mask of the compressed keys) to be 3"
LEFT = "ori_win_left: expected ori_win_left (earlier keys in the window) to be 127"
RIGHT = "ori_win_right: expected ori_win_right (later keys in the window) to be 0"
OF_MASKS = (
    ("ori_mask_mode", ORI_MODE, (0, 3)),
    ("cmp_mask_mode", CMP_MODE, (0,)),
    ("ori_win_left", LEFT, (126, 128, -1)),
    ("ori_win_right", RIGHT, (1, -1)),
)

# Calls that the host code refuses, or its check of the metadata.
CHECKED: list[Row] = [
    *((MLA, Sizes(n=good), Sizes(n=bad), HEADS, bad) for good, bad in ((1, 48), (128, 256))),
    (MLA, Sizes(), Sizes(d=576), SIZE, 576),
    *((MLA, of_kind(kind), of_kind(kind, bad), KIND, bad)
      for kind, bad in (("swa", 4), ("csa", 5), ("csa", 128), ("hca", 4), ("hca", 127))),
    *((operator, Sizes(), having(**{name: bad}), text, bad)
      for operator in ATTENTION for name, text, wrong in OF_MASKS for bad in wrong),
    *((MLA, Sizes(k=good), Sizes(k=bad), f"cmp_sparse_indices: {K}", bad)
      for good, bad in ((512, 511), (1024, 2048))),
    (MLA, Sizes(), Sizes(sink=False), SINK, None),
    *((MLA, Sizes(page=good), Sizes(page=bad), f"ori_kv: {PAGE}", bad)
      for good, bad in ((16, 8), (1024, 1040))),
    (MLAG, Sizes(), having(deterministic=True),
     "deterministic: expected False or torch.use_deterministic_algorithms(True, warn_only=True)",
     True),
    *((MLAG, Sizes(), having(**{f"actual_seq_lengths_{name}": meta(1, dtype=torch.int32)}),
       "actual_seq_lengths: expected None in layout BSND; layout TND takes lengths", "a tensor")
      for name in ("query", "ori_kv", "cmp_kv")),
    (LI, Sizes(k=8192), Sizes(k=9216),
     "sparse_count: expected at most 8192 keys (K) where cmp_ratio is above 1", 9216),
    (LI, Sizes(), Sizes(weights=HALF),
     "weights: expected float32 where cmp_ratio is above 1", "bfloat16"),
    (KLG, Sizes(), Sizes(weights=HALF), "weights: expected float32", "bfloat16"),
    (KLG, Sizes(k=512), Sizes(k=511), f"sparse_indices: {K}", 511),
    (KLG, Sizes(), Sizes(d_index=64),
     "query_index: expected Didx (head size of the indexer) to be 128", 64),
]  # fmt: skip

# Calls that the documents exclude, and the code does not look at.
DOCUMENTED: list[Row] = [
    *((operator, Sizes(), Sizes(b=0),
       "query: expected at least one sequence, one query token and one key token",
       f"query of shape [0, 7, 8, 512], {TOKENS[operator]} of shape [0, 7, 1, 512]")
      for operator in ATTENTION),
    (KLG, Sizes(), Sizes(b=0),
     "query_index: expected at least one sequence, one query token and one key token",
     "query_index of shape [0, 7, 8, 128], key_index of shape [0, 1, 1, 128]"),
    (MLA, Sizes(), having(actual_seq_lengths_query=meta(1, dtype=torch.int32)),
     "actual_seq_lengths_query: expected None in layout BSND", "a tensor"),
    (MLAG, Sizes(), Sizes(d=256), SIZE, 256),
    (LI, Sizes(n_index=64), Sizes(n_index=65), f"query: {INDEXER_HEADS} 1..64", 65),
    *((KLG, Sizes(n_index=good), Sizes(n_index=bad),
       f"query_index: {INDEXER_HEADS} one of 8, 16, 32, 64", bad)
      for good, bad in ((8, 7), (16, 24), (64, 128))),
    (KLG, Sizes(b=256), Sizes(b=257),
     "query_index: expected B (batches, or sequences) to be 1..256", 257),
    (KLG, Sizes(s=8192, residual=True), Sizes(s=8193, residual=True),
     "query_index: expected S1 (query tokens per sequence) to be 0..8192", 8193),
    (KLG, Sizes(keys=2**19, residual=True), Sizes(keys=2**19 + 1, residual=True),
     "key_index: expected S2 (key tokens per sequence) to be 0..524288", 2**19 + 1),
    (KLG, Sizes(), having(deterministic=True),
     "deterministic: expected False, as CANN documents no such kernel", True),
]  # fmt: skip

# Narrower than both: an attention, its gradient and its indexer take the same calls.
COMMON: list[Row] = [
    (MLAG, Sizes(n=128), Sizes(n=48), HEADS, 48),
    *((MLAG, of_kind(kind), of_kind(kind, bad), KIND, bad)
      for kind, bad in (("csa", 2), ("hca", 64))),
    (MLAG, Sizes(k=1024), Sizes(k=1023), f"cmp_sparse_indices: {K}", 1023),
    (MLAG, Sizes(), Sizes(sink=False), SINK, None),
    (LI, Sizes(n_index=8), Sizes(n_index=7),
     "query: expected 8 to 64 heads (Nidx) where cmp_ratio is above 1", 7),
    *((KLG, of_ratio(good), of_ratio(bad), RATIO, bad) for good, bad in ((4, 3), (128, 64))),
    (KLG, Sizes(k=1024), Sizes(k=2048), f"sparse_indices: {K}", 2048),
]  # fmt: skip


def arguments(operator: str, sizes: Sizes) -> Arguments:
    return {**MAKERS[operator](sizes), **sizes.options}


def rules() -> Iterator[Rule]:
    for operator, accepted, refused, expected, got in CHECKED + DOCUMENTED + COMMON:
        for product in ("A2", "A3"):
            device = f"Ascend {product}"
            named = expected if "{}" in expected else f"{expected} on {{}}"
            yield Rule(
                operator, f"{named.format(device)}, got {got}", (f"{product}:9.1",),
                partial(arguments, operator, accepted), partial(arguments, operator, refused),
            )  # fmt: skip
