"""A paged cache of keys and values: its blocks, whose they are, and the rows in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import check_count, shown, wrong
from ascend_attn_ops._core.pages import nz_cache_shape, slot_mapping
from ascend_attn_ops.nn.quantization import quantize_index_keys, quantize_latent
from ascend_attn_ops.ops.scatter_pa_kv_cache import scatter_pa_kv_cache_

_NAME = "ascend::PagedCache"


@dataclass(frozen=True)  # dynamo of torch 2.10 reads no property of a NamedTuple
class Step:
    """T new tokens of B sequences, one sequence after another.

    :meth:`ascend_attn_ops.PagedCache.append` returns it.

    Attributes:
        slots: (T,), where their rows go.
        positions: (T,), their numbers in their sequences.
        block_table: (B, M), the blocks of each sequence, -1 behind its last.
        query_ends: where each sequence ends in T.
        key_lengths: tokens of each sequence, with the new ones.
    """

    slots: Tensor
    positions: Tensor
    block_table: Tensor
    query_ends: list[int]
    key_lengths: list[int]

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of fused_infer_attention_score and of the sparse operators, whose queries are
        (T, N, D)."""
        return {
            "layout": "TND",
            "block_table": self.block_table,
            "actual_seq_lengths_query": self.query_ends,
            "actual_seq_lengths_key": self.key_lengths,
        }


class LayerPages(NamedTuple):
    """The pages of one layer in a step. :meth:`ascend_attn_ops.PagedCache.layer` returns it."""

    pages: dict[str, Tensor]
    step: Step

    def write(self, **rows: Tensor) -> None:
        """Writes the rows of the new tokens, (T, heads, size) for each part, to their slots.

        Parts in int8 get the rows that :func:`ascend_attn_ops.quantize_latent` makes of "latent"
        and "rope", and :func:`ascend_attn_ops.quantize_index_keys` of "index", whose scales go to
        "index_scale".
        """
        quantizes_latent = self._quantizes(rows, "latent")
        for name in rows:
            if name not in self.pages and not (quantizes_latent and name == "rope"):
                expected = f"one of {', '.join(map(repr, self.pages))}"
                raise wrong(ValueError, f"{_NAME}.write", "part", expected, repr(name))
        if quantizes_latent:
            rows["latent"] = quantize_latent(rows["latent"], rows.pop("rope"))
        if self._quantizes(rows, "index"):
            rows["index"], scales = quantize_index_keys(rows["index"])
            rows["index_scale"] = scales.unsqueeze(-1)
        parts = [(rows[name], self.pages[name]) for name in rows]
        while parts:
            (key, key_pages), *parts = parts
            # One call writes two parts of a dtype.
            pair: tuple[Tensor, ...] = ()
            if parts and parts[0][1].dtype == key_pages.dtype:
                pair, *parts = parts
            mode = "PA_NZ" if key_pages.dim() == 5 else "Norm"
            scatter_pa_kv_cache_(key, key_pages, self.step.slots, *pair, cache_mode=mode)

    def dense(self, part: str) -> Tensor:
        """A part as key or value of fused_infer_attention_score: the pages where they are."""
        pages = self.pages[part]
        return pages if pages.dim() == 5 else pages.flatten(2)

    def _quantizes(self, rows: Mapping[str, Tensor], part: str) -> bool:
        pages = self.pages.get(part)
        in_int8 = part in rows and pages is not None and pages.dtype == torch.int8
        return in_int8 and rows[part].is_floating_point()


class PagedCache:
    """Blocks of rows, and the sequences that they belong to.

    A sequence takes blocks as it grows, and gives them back when it is freed. Sequences may share
    the blocks of a common beginning. The host keeps the books; the tensors of a step tell the
    operators, which read the pages where they are.

    Args:
        num_blocks: how many blocks there are, for all sequences.
        block_size: rows of a block; NPUs want a multiple of 16, and 128 in most dense calls.
        parts: what a token has in each layer: (heads, size) by name, or (heads, size, dtype).
            {"key": (8, 128), "value": (8, 128)} for fused_infer_attention_score; {"latent":
            (1, 512), "rope": (1, 64), "index": (1, 128)} for :class:`LatentAttention`, or in int8
            {"latent": (1, 656, torch.int8), "index": (1, 128, torch.int8), "index_scale": (1, 1,
            torch.float16)}, whose rows the layer quantises as it writes them.
        layers: number of layers.
        layout: "ND", pages (num_blocks, block_size, heads, size), for all operators; or "NZ", in
            fractals (num_blocks, heads, size / L, block_size, L) with L = 32 bytes, for
            fused_infer_attention_score alone.
        dtype: of the parts; None for torch's default.
        device: of the pages.

    Raises:
        TypeError: a size is not a whole number.
        ValueError: a size is less than 1, the layout another; in its methods a sequence that is not
            there, or a length beyond its own.
        RuntimeError: there are too few free blocks; nothing has changed then.

    Example:
        >>> import torch, ascend_attn_ops
        >>> parts = {"key": (1, 64), "value": (1, 64)}
        >>> cache = ascend_attn_ops.PagedCache(6, 16, parts, dtype=torch.bfloat16)
        >>> first = cache.add()
        >>> pages = cache.layer(0, cache.append({first: 40}))
        >>> key, value = torch.randn(2, 40, 1, 64).bfloat16()
        >>> pages.write(key=key, value=value)
        >>> second = cache.fork(first)    # shares two full blocks, and copies 8 rows of the third
        >>> step = cache.append({first: 1, second: 1})
        >>> step.block_table.tolist(), step.positions.tolist(), cache.free_blocks
        ([[0, 1, 2], [0, 1, 3]], [40, 40], 2)
        >>> cache.free(first)
        >>> cache.free_blocks
        3
    """

    def __init__(
        self, num_blocks: int, block_size: int, parts: Mapping[str, Sequence[Any]], *,
        layers: int = 1, layout: str = "ND", dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        num_blocks = check_count(_NAME, "num_blocks", num_blocks, least=1)
        self.block_size = check_count(_NAME, "block_size", block_size, least=1)
        if layout not in ("ND", "NZ"):
            raise wrong(ValueError, _NAME, "layout", "'ND' or 'NZ'", shown(layout))

        def empty(heads: int, size: int, own: torch.dtype | None = None) -> Tensor:
            own = own or dtype or torch.get_default_dtype()
            heads, size = (check_count(_NAME, "parts", x, least=1) for x in (heads, size))
            if layout == "NZ":
                shape = nz_cache_shape(num_blocks * heads, self.block_size, 1, size, own)
                return torch.zeros(num_blocks, heads, *shape[1:], dtype=own, device=device)
            return torch.zeros(num_blocks, self.block_size, heads, size, dtype=own, device=device)

        self.pages = [
            {name: empty(*sizes) for name, sizes in parts.items()}
            for _ in range(check_count(_NAME, "layers", layers, least=1))
        ]
        self._device = next(iter(self.pages[0].values())).device
        # Taken from the end.
        self._free = list(reversed(range(num_blocks)))
        self._users = [0] * num_blocks
        self._blocks: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._added = 0

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence has."""
        return len(self._free)

    def length(self, sequence: int) -> int:
        """The tokens of a sequence."""
        return self._lengths[self._known("length", sequence)]

    def add(self) -> int:
        """Begins an empty sequence, and returns its number."""
        self._added += 1
        self._blocks[self._added], self._lengths[self._added] = [], 0
        return self._added

    def fork(self, sequence: int, length: int | None = None) -> int:
        """Begins a sequence with the first `length` tokens of another, and returns its number.

        The blocks that they fill are shared. The rows of the last, if they do not fill it, are
        copied to a block of its own: they have to be written by then. None: all tokens.
        """
        most = self.length(sequence)
        length = most if length is None else check_count(f"{_NAME}.fork", "length", length, 0, most)
        full, rest = divmod(length, self.block_size)
        self._check_room("fork", int(rest > 0))
        blocks = self._blocks[sequence][: full + (rest > 0)]
        new = self.add()
        self._blocks[new], self._lengths[new] = blocks[:full], length
        for block in blocks[:full]:
            self._users[block] += 1
        if rest:
            self._take(new, 1)
            with torch.no_grad():
                for pages in (x for layer in self.pages for x in layer.values()):
                    pages[self._blocks[new][-1]] = pages[blocks[-1]]
        return new

    def free(self, sequence: int) -> None:
        """Ends a sequence: its blocks are free that no other sequence has."""
        for block in reversed(self._blocks.pop(self._known("free", sequence))):
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)
        del self._lengths[sequence]

    def reserve(self, lengths: Mapping[int, int]) -> None:
        """Takes the blocks with which sequences have room for so many tokens each."""
        self._grow("reserve", lengths)

    def append(self, counts: Mapping[int, int]) -> Step:
        """Appends so many new tokens to each sequence, whose rows are then to be written.

        The new tokens stand one sequence after another, in the order of `counts`.
        """
        for count in counts.values():
            check_count(f"{_NAME}.append", "counts", count)
        before = [self._lengths[self._known("append", x)] for x in counts]
        after = [old + new for old, new in zip(before, counts.values(), strict=True)]
        self._grow("append", dict(zip(counts, after, strict=True)))
        self._lengths.update(zip(counts, after, strict=True))
        most = max((len(self._blocks[x]) for x in counts), default=0)
        rows = [self._blocks[x] + [-1] * (most - len(self._blocks[x])) for x in counts]
        owners = [i for i, count in enumerate(counts.values()) for _ in range(count)]
        places = [x for a, b in zip(before, after, strict=True) for x in range(a, b)]
        # On the host, where every number is known.
        table, positions = torch.tensor(rows, dtype=torch.int32), torch.tensor(places).int()
        slots = slot_mapping(table[owners], positions, self.block_size) if places else positions
        ends = list(accumulate(counts.values()))
        slots, positions, table = (x.to(self._device) for x in (slots, positions, table))
        return Step(slots, positions, table, ends, after)

    def layer(self, layer: int, step: Step) -> LayerPages:
        """The pages of a layer, to write the rows of a step and to attend to all."""
        return LayerPages(self.pages[layer], step)

    def _known(self, method: str, sequence: int) -> int:
        if sequence not in self._blocks:
            expected = "a sequence of add() or fork() that is not freed"
            raise wrong(ValueError, f"{_NAME}.{method}", "sequence", expected, shown(sequence))
        return sequence

    def _grow(self, method: str, lengths: Mapping[int, int]) -> None:
        missing = {
            x: max(-(-length // self.block_size) - len(self._blocks[self._known(method, x)]), 0)
            for x, length in lengths.items()
        }
        self._check_room(method, sum(missing.values()))
        for sequence, count in missing.items():
            self._take(sequence, count)

    def _check_room(self, method: str, count: int) -> None:
        if count > len(self._free):
            expected = f"at most {len(self._free)}, which are free of {len(self._users)}"
            raise wrong(RuntimeError, f"{_NAME}.{method}", "new blocks", expected, str(count))

    def _take(self, sequence: int, count: int) -> None:
        blocks = [self._free.pop() for _ in range(count)]
        self._blocks[sequence] += blocks
        for block in blocks:
            self._users[block] = 1

    def __repr__(self) -> str:
        parts = {name: list(x.shape[1:]) for name, x in self.pages[0].items()}
        return (
            f"PagedCache({len(self._users)} blocks of {self.block_size}, {len(self._free)} free; "
            f"{len(self._blocks)} sequences; {len(self.pages)} layers of {parts})"
        )
