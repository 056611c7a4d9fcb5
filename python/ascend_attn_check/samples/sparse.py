"""The sizes, lengths and selected indices of the sparse operators' samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from ascend_attn_ops.reference.call import noticed
from ascend_attn_ops.reference.declaration import Arguments
from ascend_attn_ops.reference.sequences import rows
from torch import Tensor

from .randomness import Random

LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")


@dataclass(frozen=True)
class SparseCase:
    layout: str = "BSND"
    b: int = 2
    s: tuple[int, int] = (5, 7)  # S1, S2: BSND only
    # Per sequence, for queries and keys: counts in BSND, made cumulative in TND.
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    tail: tuple[int, int] = (0, 0)  # tokens after the last sequence: TND only
    heads: int = 4
    d: int = 64
    rope: int = 0
    index_heads: int = 3
    index_d: int = 20
    k: int = 4
    mode: int = 3
    block: int = 1
    pattern: str = "random"  # of sparse_indices, see `indices`
    absorbed: bool = False  # value is key
    selection_heads: bool = True  # whether sparse_indices have the axis of heads
    page: int = 0  # rows per block of the cache that has the keys; 0: keys side by side
    statistics: bool = False  # of paged keys; those of others are always returned
    ratio: int = 1  # tokens that a key stands for
    residuals: tuple[int, ...] | None = None  # of every sequence; None: the argument is left out

    @property
    def id(self) -> str:
        def join(lengths: tuple[int, ...]) -> str:
            return "+".join(map(str, lengths)) or "none"

        if self.layout == "BSND":
            parts = [f"BSND-B{self.b}-S{self.s[0]}x{self.s[1]}"]
        else:
            parts = [f"TND-T{self.tokens(0)[0]}x{self.tokens(1)[0]}"]
        if self.lengths is not None:
            parts.append(f"L{join(self.lengths[0])}x{join(self.lengths[1])}")
        parts += [f"H{self.heads}-D{self.d}-K{self.k}-mode{self.mode}"]
        parts += [f"rope{self.rope}"] if self.rope else []
        parts += [f"block{self.block}"] if self.block > 1 else []
        parts += [self.pattern] if self.pattern != "random" else []
        parts += ["absorbed"] if self.absorbed else []
        parts += [] if self.selection_heads else ["noheads"]
        parts += [f"page{self.page}"] if self.page else []
        parts += ["statistics"] if self.page and self.statistics else []
        parts += [f"ratio{self.ratio}"] if self.ratio > 1 else []
        parts += [] if self.residuals is None else [f"residuals{join(self.residuals)}"]
        return "-".join(parts)

    def tokens(self, side: int) -> tuple[int, ...]:
        """The leading dimensions of queries (0) or keys (1)."""
        if self.page and side == 1:
            spare = 2 + self.s[1] + self.tail[1]
            return sum(map(self.pages_of, self.key_counts)) + spare, self.page
        if self.layout == "BSND":
            return self.b, self.s[side]
        assert self.lengths is not None
        return (sum(self.lengths[side]) + self.tail[side],)

    @property
    def key_counts(self) -> tuple[int, ...]:
        assert self.lengths is not None
        return self.lengths[1]

    def pages_of(self, length: int) -> int:
        return -(-length // self.page)

    def dense(self) -> SparseCase:
        """Returns the same call with contiguous keys."""
        return replace(self, page=0)

    def length_list(self, side: int) -> list[int] | None:
        if self.lengths is None:
            return None
        lengths = self.lengths[side]
        counts = self.layout == "BSND" or (self.page and side == 1)
        return list(lengths) if counts else list(accumulate(lengths))

    def length_options(self) -> dict[str, Tensor | None]:
        lists = [self.length_list(side) for side in (0, 1)]
        return {
            name: None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
            for name, lengths in zip(LENGTHS, lists, strict=True)
        }

    def compression_options(self) -> dict[str, Any]:
        if self.ratio == 1:
            return {}
        given = self.residuals
        residual = None if given is None else torch.tensor(given, dtype=torch.int32)
        return {"cmp_ratio": self.ratio, "cmp_residual_key": residual}


# By lengths that may be left out, as they are all tokens in BSND.
ALL_TOKENS = {
    LENGTHS[0]: SparseCase(lengths=((5, 5), (7, 4))),
    LENGTHS[1]: SparseCase(lengths=((5, 3), (7, 7))),
}


@dataclass(frozen=True)
class Pages:
    """The blocks that hold the keys of a case. All other rows of its caches are NaN, or 127 in
    int8, and the entries of the table that name none are out of range: nobody reads either."""

    table: Tensor
    slots: Tensor  # of every key, sequence by sequence

    @classmethod
    def draw(cls, case: SparseCase, random: Random) -> Pages:
        counts = [case.pages_of(length) for length in case.key_counts]
        order = random.permutation(case.tokens(1)[0])
        table = torch.full((len(counts), max(counts, default=0) + 1), -(10**6), dtype=torch.int32)
        slots = []
        for row, count, length in zip(table, counts, case.key_counts, strict=True):
            row[:count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
            of_blocks = row[:count, None] * case.page + torch.arange(case.page, dtype=torch.int32)
            slots.append(of_blocks.flatten()[:length])
        return cls(table, torch.cat(slots).long() if slots else torch.empty(0, dtype=torch.long))

    def cache(self, case: SparseCase, rows: Tensor) -> Tensor:
        """(num_blocks, page, ...) of rows (num_blocks, page, ...)."""
        unread = torch.ones(rows.shape[0] * case.page, dtype=torch.bool)
        unread[self.slots] = False
        tokens = rows.flatten(0, 1)
        unread = unread.view(-1, *[1] * (tokens.dim() - 1))
        return tokens.masked_fill(unread, noticed(rows)).view(rows.shape)

    def options(self, layout: str) -> dict[str, Any]:
        return {layout: "PA_BSND", "block_table": self.table}


def indices(case: SparseCase, random: Random) -> Tensor:
    """(B,S1,1,K) or (T1,1,K), or as the case says without the axis of heads: blocks that each query
    may see, in random order, padded by -1.

    The other patterns: `padded` rows stop short of K; `first` has a -1 in the first slot of every
    third row; `hole` has one in the middle; `duplicates` draws with replacement; `future` names
    keys that the mask hides or that lie behind the length of the batch; `unread` leaves valid
    indices in the slots that no query uses.
    """
    case = case.dense()
    query, key = (torch.empty(case.tokens(side)) for side in (0, 1))
    result = torch.full((query.numel(), case.k), -1, dtype=torch.int32)
    arguments = Arguments(
        query=query,
        key=key,
        layout=case.layout,
        sparse_mode=case.mode,
        actual_seq_lengths_query=case.length_list(0),
        actual_seq_lengths_key=case.length_list(1),
        **case.compression_options(),
    )
    for row in rows(arguments):
        visible, blocks = -(-row.limit // case.block), -(-row.capacity // case.block)
        chosen = row_indices(case.pattern, case.k, row.token, visible, blocks, random)
        result[row.token] = torch.tensor(chosen, dtype=torch.int32)
    return result.view(*query.shape, *([1] if case.selection_heads else []), case.k)


def row_indices(
    pattern: str, k: int, token: int, visible: int, keys: int, random: Random
) -> list[int]:
    """k slots of a query that sees the first keys, or blocks, of so many."""
    n = min(k, visible)
    chosen, filler = random.permutation(visible)[:n], [-1] * (k - n)
    match pattern:
        case "padded" if n > 0:
            stop = random.integer(0, n)
            chosen[stop:] = [-1] * (n - stop)
        case "first" if n > 0 and token % 3 == 0:
            chosen[0] = -1
        case "hole" if n > 0:
            chosen[n // 2] = -1
        case "duplicates":
            chosen = [random.integer(0, visible - 1) for _ in range(n)]
        case "future":
            chosen = random.permutation(keys)[:n]
        case "unread" if keys > 0:
            filler = [random.integer(0, keys - 1) for _ in filler]
    return chosen + filler


COMPRESSED = [
    SparseCase(s=(6, 1), ratio=4),
    SparseCase(b=1, s=(61, 15), heads=8, k=7, ratio=4),
    SparseCase(s=(3, 0), ratio=4),  # no key is complete
    SparseCase(s=(5, 9), k=6, ratio=4, residuals=(3, 0)),  # the end of a longer sequence
    SparseCase(s=(9, 9), ratio=3, residuals=(2, 0), mode=0),
    SparseCase(s=(9, 4), ratio=128, mode=0),
    SparseCase(s=(40, 2), ratio=4, residuals=(1, 2), heads=3),  # more queries than tokens
    SparseCase(b=3, s=(9, 4), lengths=((9, 5, 0), (4, 2, 0)), ratio=2),
    SparseCase(layout="TND", lengths=((13, 0, 3, 8), (3, 0, 0, 2)), ratio=4, k=3),
    SparseCase(
        layout="TND", lengths=((3, 5, 0, 2), (4, 0, 5, 9)), tail=(2, 3), ratio=4, k=5,
        residuals=(1, 3, 0, 2),
    ),
]  # fmt: skip


def on_device(case: SparseCase) -> bool:
    return case.k >= 1024


def sized(**sizes: Any) -> Callable[[SparseCase], SparseCase | None]:
    """Other sizes for cases whose rows select as many keys as they see, or K.

    Devices read out of bounds in rows with fewer: docs/device.md.
    """

    def with_sizes(case: SparseCase) -> SparseCase | None:
        return replace(case, **sizes) if case.pattern == "random" else None

    return with_sizes
