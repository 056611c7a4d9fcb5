"""Both sides of each rule of the sparse operators, with the text of the error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .rule import Rule

Arguments = dict[str, Any]
HALF = torch.bfloat16


def meta(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call in layout BSND, or, with `lengths`, in layout TND."""

    b: int = 1
    s1: int = 4
    s2: int = 4096
    n: int = 64
    d: int = 512
    dr: int = 64
    n_index: int = 64
    k: int = 2048
    weights: torch.dtype = HALF
    t1: int = 0  # tokens behind the last query sequence
    lengths: tuple[list[int], list[int]] | None = None
    on_host: bool = False  # the lengths
    index_heads: bool = True  # an axis of heads in sparse_indices
    options: Arguments = field(default_factory=dict)

    def tokens(self, side: int) -> tuple[int, ...]:
        if self.lengths is None:
            return (self.b, (self.s1, self.s2)[side])
        return (self.lengths[side][-1] + (self.t1 if side == 0 else 0),)

    def length_options(self) -> Arguments:
        if self.lengths is None:
            return {}
        values = [x if self.on_host else meta(len(x), dtype=torch.int32) for x in self.lengths]
        names = ("actual_seq_lengths_query", "actual_seq_lengths_key")
        return {"layout": "TND", **dict(zip(names, values, strict=True))}

    def statistics(self) -> Tensor:
        *batch, tokens = self.tokens(0)
        return meta(*batch, 1, tokens, self.n, dtype=torch.float32)

    def indices(self) -> Tensor:
        axis = (1,) if self.index_heads else ()
        return meta(*self.tokens(0), *axis, self.k, dtype=torch.int32)


def lightning_indexer(x: Sizes) -> Arguments:
    return {
        "query": meta(*x.tokens(0), x.n_index, 128),
        "key": meta(*x.tokens(1), 1, 128),
        "weights": meta(*x.tokens(0), x.n_index, dtype=x.weights),
        "sparse_count": x.k,
        **x.length_options(),
    }


def quant_lightning_indexer(x: Sizes) -> Arguments:
    arguments = lightning_indexer(x)
    weights = arguments["weights"].half() if x.weights == HALF else arguments["weights"]
    return {
        **arguments,
        **{name: arguments[name].to(torch.int8) for name in ("query", "key")},
        "weights": weights,
        "query_dequant_scale": weights.half(),
        "key_dequant_scale": meta(*x.tokens(1), 1, dtype=torch.float16),
    }


def lightning_indexer_grad(x: Sizes) -> Arguments:
    arguments = lightning_indexer(x)
    del arguments["sparse_count"]
    indices = x.indices()
    return {**arguments, "sparse_indices": indices, "d_values": indices.to(HALF)}


def sparse_flash_attention(x: Sizes) -> Arguments:
    key = meta(*x.tokens(1), 1, x.d)
    ropes = {
        "query_rope": meta(*x.tokens(0), x.n, x.dr),
        "key_rope": meta(*x.tokens(1), 1, x.dr),
    }
    return {
        "query": meta(*x.tokens(0), x.n, x.d),
        "key": key,
        "value": key,
        "sparse_indices": x.indices(),
        "scale_value": 0.1,
        **(ropes if x.dr else {}),
        **x.length_options(),
    }


def kv_quant_sparse_flash_attention(x: Sizes) -> Arguments:
    bytes_of_row = x.d + 2 * x.dr + 4 * -(-x.d // 128)
    key = meta(*x.tokens(1), 1, bytes_of_row, dtype=torch.int8)
    return {
        "query": meta(*x.tokens(0), x.n, x.d + x.dr),
        "key": key,
        "value": key,
        "sparse_indices": x.indices(),
        "scale_value": 0.1,
        "rope_head_dim": x.dr,
        **x.length_options(),
    }


def sparse_flash_attention_grad(x: Sizes) -> Arguments:
    arguments = sparse_flash_attention(x)
    out, statistics = arguments["query"], x.statistics()
    saved = {"d_out": out, "out": out, "softmax_max": statistics, "softmax_sum": statistics}
    return {**arguments, **saved}


def sparse_lightning_indexer_grad_kl_loss(x: Sizes) -> Arguments:
    attention = sparse_flash_attention_grad(x)
    for name in ("value", "d_out", "out"):
        del attention[name]
    return {
        **attention,
        "query_index": meta(*x.tokens(0), x.n_index, 128),
        "key_index": meta(*x.tokens(1), 1, 128),
        "weights": meta(*x.tokens(0), x.n_index, dtype=x.weights),
    }


MAKERS = {
    make.__name__: make
    for make in (
        lightning_indexer,
        lightning_indexer_grad,
        sparse_flash_attention,
        sparse_flash_attention_grad,
        sparse_lightning_indexer_grad_kl_loss,
        kv_quant_sparse_flash_attention,
        quant_lightning_indexer,
    )
}
LI, LIG, SFA, SFAG, KL, INT8, QLI = MAKERS
EVERY = 2**63 - 1


def tnd(query: list[int], key: list[int], **others: Any) -> Sizes:
    return Sizes(lengths=(query, key), **others)


def packed(query: list[int], key: list[int], **others: Any) -> Sizes:
    return tnd(query, key, on_host=True, **others)


# The hint of the error for a K that no indexer has alone.
TAIL = "; for a selection with a tail of recent keys, pass the indexer's own K (2048) to the loss"

# Operator, device, what it accepts, what it refuses and the rule that the error states.
RULES: list[tuple[str, str, Sizes, Sizes, str]] = [
    (LI, "A2:9.1", Sizes(n_index=1), Sizes(n_index=65),
     "query: expected Nidx (query heads of the indexer) to be 1..64 on Ascend A2, got 65"),
    (LI, "A2:8.5", Sizes(n_index=3), Sizes(n_index=128),
     "query: expected Nidx (query heads of the indexer) to be 1..64 on Ascend A2, got 128"),
    (LI, "950:9.1", Sizes(n_index=24), Sizes(n_index=12),
     "query: expected Nidx (query heads of the indexer) to be one of 8, 16, 24, 32, 64 on Ascend "
     "950, got 12"),
    (LI, "A2:8.5", Sizes(k=2048), Sizes(k=3072),
     "sparse_count: expected K (selected keys per token) to be 1..2048 on Ascend A2 with CANN 8.5, "
     "got 3072"),
    (LI, "A2:9.0", Sizes(k=9216), Sizes(k=9217),
     "sparse_count: expected K (selected keys per token) to be 1..2048 or a multiple of 1024 on "
     "Ascend A2 with CANN 9.0, got 9217"),
    (LI, "A2:9.0", Sizes(weights=torch.float32), Sizes(weights=torch.float32, n_index=65),
     "query: expected Nidx (query heads of the indexer) to be 1..64 on Ascend A2, got 65"),
    (LI, "A2:8.5", Sizes(), Sizes(weights=torch.float32),
     "weights: expected query's dtype on Ascend A2 with CANN 8.5, got float32"),
    (LI, "950:9.1", Sizes(), Sizes(weights=torch.float32),
     "weights: expected query's dtype on Ascend 950, got float32"),
    (LI, "A3:9.1", Sizes(options={"pre_tokens": EVERY}), Sizes(options={"pre_tokens": EVERY - 1}),
     f"pre_tokens: expected pre_tokens (earlier keys that a query sees) to be {EVERY} on Ascend "
     f"A3, got {EVERY - 1}"),
    (LI, "A2:8.5", Sizes(), Sizes(options={"next_tokens": 0}),
     f"next_tokens: expected next_tokens (later keys that a query sees) to be {EVERY} on Ascend "
     "A2, got 0"),
    (LI, "A2:9.1", Sizes(b=3000, s2=2**20), Sizes(s1=0),
     "query: expected at least one sequence, one query token and one key token on Ascend A2, got "
     "query of shape [1, 0, 64, 128], key of shape [1, 4096, 1, 128]"),
    (QLI, "A2:9.0", Sizes(), Sizes(n_index=32),
     "query: expected Nidx (query heads of the indexer) to be 64 on Ascend A2 with CANN 9.0, got "
     "32"),
    (QLI, "A2:9.1", Sizes(n_index=1), Sizes(n_index=65),
     "query: expected Nidx (query heads of the indexer) to be 1..64 on Ascend A2 with CANN 9.1, "
     "got 65"),
    (QLI, "A3:8.5", Sizes(k=1), Sizes(k=2049),
     "sparse_count: expected K (selected keys per token) to be 1..2048 on Ascend A3, got 2049"),
    (QLI, "A2:9.1", Sizes(), Sizes(weights=torch.float32),
     "weights: expected float16 on Ascend A2, got float32"),
    (LIG, "A2:9.0", Sizes(), Sizes(n_index=32),
     "query: expected Nidx (query heads of the indexer) to be 64 on Ascend A2 with CANN 9.0, got "
     "32"),
    (LIG, "A2:9.1", Sizes(n_index=1), Sizes(n_index=65),
     "query: expected Nidx (query heads of the indexer) to be 1..64 on Ascend A2 with CANN 9.1, "
     "got 65"),
    (LIG, "A2:8.5", Sizes(k=1), Sizes(k=2049),
     "sparse_indices: expected K (selected keys per token) to be 1..2048 on Ascend A2, got 2049"),
    (LIG, "A2:9.1", Sizes(b=32, s2=2**20 - 1), Sizes(b=32, s2=2**20),
     "key: expected fewer than 2^32 elements on Ascend A2, got 4294967296"),
    (LIG, "A2:9.1", Sizes(s2=2048, options={"sparse_mode": 0}),
     Sizes(s2=2047, options={"sparse_mode": 0}),
     "sparse_indices: expected at least K keys in every sequence in sparse_mode 0 on Ascend A2, "
     "got 2047 keys for K = 2048"),
    (SFA, "A3:9.1", Sizes(n=128), Sizes(n=48),
     "query: expected N1 (query heads) to be one of 1, 2, 4, 8, 16, 32, 64, 128 on Ascend A3, got "
     "48"),
    (SFA, "950:9.1", Sizes(n=48), Sizes(n=129),
     "query: expected N1 (query heads) to be 1..128 on Ascend 950, got 129"),
    (SFA, "A2:8.5", Sizes(k=1, s2=2**18), Sizes(k=0),
     "sparse_indices: expected at least one key or block per token on Ascend A2, got 0"),
    (SFA, "A2:9.1", Sizes(dr=0, k=2176), Sizes(dr=0, k=0),
     "sparse_indices: expected at least one key or block per token on Ascend A2, got 0"),
    (SFA, "950:9.1", Sizes(dr=0, k=2176), Sizes(dr=32),
     "query_rope: expected Dr (head size of the rope part) to be 64 on Ascend 950, got 32"),
    (SFA, "A2:9.1", Sizes(options={"sparse_block_size": 128}),
     Sizes(options={"sparse_block_size": 4}),
     "sparse_block_size: expected sparse_block_size (keys per block) to be one of 1, 8, 16, 32, "
     "64, 128 on Ascend A2, got 4"),
    (SFA, "950:9.1", Sizes(), Sizes(options={"sparse_block_size": 2}),
     "sparse_block_size: expected sparse_block_size (keys per block) to be 1 on Ascend 950, got 2"),
    (SFA, "A2:9.1", Sizes(), Sizes(options={"pre_tokens": 2**31 - 1}),
     f"pre_tokens: expected pre_tokens (earlier keys that a query sees) to be {EVERY} on Ascend "
     f"A2, got {2**31 - 1}"),
    (INT8, "A2:9.1", Sizes(n=128), Sizes(n=48),
     "query: expected N1 (query heads) to be one of 1, 2, 4, 8, 16, 32, 64, 128 on Ascend A2, got "
     "48"),
    (INT8, "950:9.1", Sizes(n=48), Sizes(n=3),
     "query: expected N1 (query heads) to be one of 1, 2, 4, 8, 16, 32, 48, 64, 128 on Ascend 950, "
     "got 3"),
    (INT8, "A3:8.5", Sizes(k=1), Sizes(k=0),
     "sparse_indices: expected at least one key or block per token on Ascend A3, got 0"),
    (INT8, "A2:8.5", Sizes(), Sizes(options={"sparse_block_size": 2}),
     "sparse_block_size: expected sparse_block_size (keys per block) to be 1 on Ascend A2, got 2"),
    (INT8, "A2:9.0", Sizes(), Sizes(d=640),
     "query: expected D (head size with rope) to be 576 on Ascend A2, got 704"),
    (INT8, "A3:9.1", Sizes(), Sizes(d=544, dr=32),
     "rope_head_dim: expected Dr (head size of the rope part) to be 64 on Ascend A3, got 32"),
    (SFAG, "A2:8.5", Sizes(k=2048), Sizes(k=1024),
     "sparse_indices: expected K (selected keys or blocks per token) to be 2048 on Ascend A2 with "
     "CANN 8.5, got 1024"),
    (SFAG, "A2:9.0", Sizes(k=1, options={"pre_tokens": 3}), Sizes(k=0),
     "sparse_indices: expected at least one key or block per token on Ascend A2, got 0"),
    (SFAG, "A2:9.0", Sizes(dr=0, k=2176), Sizes(dr=0, k=0),
     "sparse_indices: expected at least one key or block per token on Ascend A2, got 0"),
    (SFAG, "A2:8.5", Sizes(dr=0), Sizes(dr=0, k=2176),
     "sparse_indices: expected K (selected keys or blocks per token) to be 2048 on Ascend A2 with "
     "CANN 8.5, got 2176"),
    (SFAG, "950:9.1", Sizes(dr=0), Sizes(dr=0, k=2176),
     "sparse_indices: expected K (selected keys per token) to be a multiple of 1024 in 1024..8192 "
     "on Ascend 950, got 2176"),
    (SFAG, "A2:9.1", Sizes(options={"sparse_block_size": 64}),
     Sizes(options={"sparse_block_size": 2}),
     "sparse_block_size: expected sparse_block_size (keys per block) to be one of 1, 8, 16, 32, "
     "64, 128 on Ascend A2, got 2"),
    (SFAG, "A3:9.0", Sizes(k=8, options={"sparse_block_size": 128}),
     Sizes(k=7, options={"sparse_block_size": 128}),
     "sparse_indices: expected K of at least 8 for sparse_block_size 128 on Ascend A3, got 7"),
    (SFAG, "950:9.1", Sizes(k=8192, n=48), Sizes(k=1536, n=48),
     "sparse_indices: expected K (selected keys per token) to be a multiple of 1024 in 1024..8192 "
     "on Ascend 950, got 1536"),
    (SFAG, "950:9.1", Sizes(n=3), Sizes(n=3, options={"sparse_block_size": 3}),
     "sparse_block_size: expected sparse_block_size (keys per block) to be 1 on Ascend 950, got 3"),
    (SFAG, "950:9.1", Sizes(n=3), Sizes(n=5),
     "query: expected N1 (query heads) to be one of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128 "
     "on Ascend 950, got 5"),
    (SFAG, "A2:8.5", Sizes(), Sizes(options={"deterministic": True}),
     "deterministic: expected False or torch.use_deterministic_algorithms(True, warn_only=True) on "
     "Ascend A2 with CANN 8.5, got True"),
    (KL, "A2:8.5", Sizes(n=64), Sizes(n=32),
     "query: expected N1 (query heads) to be one of 64, 128 on Ascend A2 with CANN 8.5, got 32"),
    (KL, "A2:9.0", Sizes(n=32), Sizes(n=8),
     "query: expected N1 (query heads) to be one of 32, 64, 128 on Ascend A2 with CANN 9.0, got 8"),
    (KL, "950:9.1", Sizes(n=48, n_index=24), Sizes(n=48, n_index=32),
     "query_index: expected Nidx 24 with N1 48, and neither without the other on Ascend 950, got "
     "N1 48 and Nidx 32"),
    (KL, "A2:9.1", Sizes(k=1024), Sizes(k=1025),
     "sparse_indices: expected K (selected keys per token) to be a multiple of 1024 in 1024..8192 "
     "on Ascend A2 with CANN 9.1, got 1025"),
    (KL, "A2:8.5", Sizes(k=2048), Sizes(k=1024),
     "sparse_indices: expected K (selected keys per token) to be 2048 on Ascend A2 with CANN 8.5, "
     "got 1024"),
    (KL, "A3:9.0", Sizes(weights=torch.float32, dr=0), Sizes(dr=0, k=2176),
     "sparse_indices: expected K (selected keys per token) to be a multiple of 1024 in 1024..8192 "
     f"on Ascend A3 with CANN 9.0, got 2176{TAIL}"),
    (KL, "950:9.1", Sizes(dr=0, k=3072), Sizes(dr=0, k=2176),
     "sparse_indices: expected K (selected keys per token) to be a multiple of 1024 in 1024..8192 "
     f"on Ascend 950, got 2176{TAIL}"),
    (KL, "A2:8.5", Sizes(dr=0), Sizes(dr=0, k=2176),
     "sparse_indices: expected K (selected keys per token) to be 2048 on Ascend A2 with CANN 8.5, "
     f"got 2176{TAIL}"),
    (KL, "A2:8.5", Sizes(), Sizes(weights=torch.float32),
     "weights: expected query's dtype on Ascend A2 with CANN 8.5, got float32"),
    (KL, "A2:9.0", Sizes(s1=2**15, s2=2**15), Sizes(s1=2**15 + 1, s2=2**15 + 1),
     "query: expected S1 (query tokens per sequence) to be 0..32768 on Ascend A2 with CANN 9.0, "
     "got 32769"),
    (KL, "A2:9.1", packed([2**15, 2**16], [2**15, 2**16]), packed([2**15 + 1], [2**15 + 1]),
     "query: expected S1 (query tokens per sequence) to be 0..32768 on Ascend A2 with CANN 9.1, "
     "got 32769"),
    (KL, "A2:9.1", packed([3, 5], [3, 5]), packed([3, 5], [2, 5]),
     "query: expected at most as many query tokens as key tokens, in all and in every sequence on "
     "Ascend A2, got 3 query tokens and 2 key tokens"),
    (KL, "A2:9.1", packed([3, 5], [30, 50], t1=1), packed([3, 5], [3, 5], t1=1),
     "query: expected at most as many query tokens as key tokens, in all and in every sequence on "
     "Ascend A2, got 6 query tokens and 5 key tokens"),
    (KL, "A2:9.0", packed([3, 5], [3, 50]), packed([3, 5], [3, 50], t1=1),
     "actual_seq_lengths_query: expected the last cumulative lengths to be T1 and T2 on Ascend A2 "
     "with CANN 9.0, got 5 of 6 and 50 of 50"),
    (KL, "950:9.1", packed([3, 5], [3, 50]), packed([3, 5], [3, 50], t1=1),
     "actual_seq_lengths_query: expected the last cumulative lengths to be T1 and T2 on Ascend "
     "950, got 5 of 6 and 50 of 50"),
]  # fmt: skip


def arguments(operator: str, sizes: Sizes) -> Arguments:
    return {**MAKERS[operator](sizes), **sizes.options}


def rules() -> Iterator[Rule]:
    for operator, device, accepted, refused, message in RULES:
        yield Rule(
            operator, message, (device,), partial(arguments, operator, accepted),
            partial(arguments, operator, refused),
        )  # fmt: skip
