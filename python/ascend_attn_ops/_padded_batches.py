"""Batches with padding behind their sequences, in every layout but TND, as packs of layout TND."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops import _C
from ascend_attn_ops._arguments import check_tensor, shown, whole, wrong
from ascend_attn_ops._dense_attention import have_scores
from ascend_attn_ops._packing import Lengths, Where, lengths_of, not_lengths

_AXES = _C.layout_axes
_NAMES = ("actual_seq_lengths_query", "actual_seq_lengths_key")
# Modes that layout TND has too, with the same meaning.
_MODES = (0, 1, 2, 3, 4, 6)
QUERY, KEY = 0, 1
Options = dict[str, Any]
Results = tuple[Tensor, Tensor, Tensor]
Attention = Callable[..., Results]
_LANES = 8  # how often each statistic is repeated


@dataclass(frozen=True)
class PaddedBatch:
    """The sequences of a padded batch. Pairs are those of queries and of keys."""

    function: str
    layout: str
    batch: int
    heads: tuple[int, int]
    tokens: tuple[int, int]  # of every sequence, with its padding
    lengths: tuple[Sequence[int], Sequence[int]]

    @property
    def complete(self) -> bool:
        """Whether there is no padding."""
        return all(n == room for x, room in zip(self.lengths, self.tokens, strict=True) for n in x)

    def pack(self, argument: str, x: Tensor, side: int) -> Tensor:
        """The tokens without the padding, (T, N, D)."""
        batch_axis, token_axis, head_axis = _AXES[self.layout]
        check_tensor(self.function, argument, x)
        if x.dim() != len(self.layout) or (
            (x.shape[batch_axis], x.shape[token_axis]) != (self.batch, self.tokens[side])
            or x.shape[head_axis] % self.heads[side]
        ):
            expected = f"{('query', 'key')[side]}'s shape but for the head size"
            raise wrong(ValueError, self.function, argument, expected, str(list(x.shape)))
        if head_axis == x.dim() - 1:  # BSH and SBH
            x = x.unflatten(-1, (self.heads[side], -1))
        x = self._swapped(x)
        room = self.tokens[side]
        sizes = [n for length in self.lengths[side] for n in (length, room - length)]
        return torch.cat(x.flatten(0, 1).split(sizes)[::2])

    def unpack(self, x: Tensor, side: int) -> Tensor:
        """The way back, with zeros in place of the padding."""
        lengths, room = self.lengths[side], self.tokens[side]
        padding = x.new_zeros(room - min(lengths), *x.shape[1:])
        parts = x.split(list(lengths))
        padded = [y for part in parts for y in (part, padding[: room - part.shape[0]])]
        x = self._swapped(torch.cat(padded).unflatten(0, (self.batch, room)))
        return (x.flatten(2) if len(self.layout) == 3 else x).contiguous()

    def _swapped(self, x: Tensor) -> Tensor:
        """From the layout to (B, S, N, D), and back."""
        if self.layout == "SBH":
            return x.transpose(0, 1)
        return x.transpose(1, 2) if self.layout == "BNSD" else x

    def pack_statistics(self, argument: str, x: Tensor) -> Tensor:
        """(B, N, Sq, 8) as layout TND has them: (N, length, 8) of one sequence after another."""
        expected = (self.batch, self.heads[QUERY], self.tokens[QUERY], _LANES)
        check_tensor(self.function, argument, x)
        if tuple(x.shape) != expected:
            text = f"shape (B, N, Sq, 8) = {expected}"
            raise wrong(ValueError, self.function, argument, text, str(list(x.shape)))
        sequences = zip(x.unbind(0), self.lengths[QUERY], strict=True)
        return torch.cat([y[:, :n].reshape(n, self.heads[QUERY], _LANES) for y, n in sequences])

    def unpack_statistics(self, x: Tensor) -> Tensor:
        lengths, room = self.lengths[QUERY], self.tokens[QUERY]
        parts = zip(x.split(list(lengths)), lengths, strict=True)
        by_head = [part.reshape(self.heads[QUERY], n, _LANES) for part, n in parts]
        pad = torch.nn.functional.pad
        return torch.stack([pad(y, (0, 0, 0, room - y.shape[1])) for y in by_head])

    def mask(self, argument: str, mask: Tensor | None, sparse_mode: int) -> Tensor | None:
        """A full mask, up to the longest sequence. It is a view."""
        mode = whole(sparse_mode)
        if mode is not None and mode not in _MODES:
            expected = "one of 0, 1, 2, 3, 4, 6 beside the lengths of a padded batch"
            raise wrong(ValueError, self.function, "sparse_mode", expected, str(mode))
        if mode not in (0, 1) or not isinstance(mask, Tensor):
            return mask
        check_tensor(self.function, argument, mask)
        sizes = (self.batch, self.heads[QUERY], *self.tokens)
        fits = mask.dim() == 2 and tuple(mask.shape) == self.tokens
        if mask.dim() == 4:
            fits = all(x in (1, y) for x, y in zip(mask.shape, sizes, strict=True))
        if not fits:
            expected = (
                f"shape (B, N, Sq, Skv), whose axes may be 1, or (Sq, Skv), with B, N, Sq, Skv = "
                f"{', '.join(map(str, sizes))}"
            )
            got = str(list(mask.shape))
            if tuple(mask.shape) == (self.batch, self.tokens[KEY]):
                got += "; pass mask[:, None, None]"
            raise wrong(ValueError, self.function, argument, expected, got)
        queries, keys = (max(x) for x in self.lengths)
        return mask[..., :queries, :keys]

    def bias(self, pse_shift: Tensor | None, pse_type: int) -> Tensor | None:
        """pse_shift as layout TND has it; slopes stay as they are."""
        if not isinstance(pse_shift, Tensor) or whole(pse_type) not in (0, 1):
            return pse_shift
        check_tensor(self.function, "pse_shift", pse_shift)
        heads, tokens = self.heads[QUERY], self.tokens
        if not (
            pse_shift.dim() == 4
            and pse_shift.shape[0] in (1, self.batch)
            and pse_shift.shape[1] == heads
            and pse_shift.shape[2] in (1, tokens[QUERY])
            and pse_shift.shape[3] == tokens[KEY]
        ):
            expected = (
                "(B or 1, N, Sq or 1, Skv) beside the lengths of a padded batch, with B, N, Sq, "
                f"Skv = {self.batch}, {heads}, {tokens[QUERY]}, {tokens[KEY]}"
            )
            got = f"shape {list(pse_shift.shape)}"
            raise wrong(ValueError, self.function, "pse_shift", expected, got)
        pairs = list(zip(*self.lengths, strict=True))
        # Layout TND takes a bias of as many elements as there are scores for one of scores.
        per_key = pse_shift.shape[2] == 1 and sum(q * k for q, k in pairs) != sum(self.lengths[KEY])
        rows = 1 if per_key else tokens[QUERY]
        expanded = pse_shift.expand(self.batch, heads, rows, tokens[KEY]).unbind(0)
        return torch.cat(
            [
                x[:, : 1 if per_key else q, :k].flatten()
                for x, (q, k) in zip(expanded, pairs, strict=True)
            ]
        )

    def attend(self, attention: Attention, tensors: Options, options: Options) -> Results:
        """The results of `attention`, which is called in layout TND."""
        arguments = {**self._packed(tensors), **self._options(options)}
        out, softmax_max, softmax_sum = attention(**arguments)
        statistics = self.unpack_statistics(softmax_max), self.unpack_statistics(softmax_sum)
        return self.unpack(out, QUERY), *statistics

    def differentiate(self, gradient: Attention, tensors: Options, options: Options) -> Results:
        dq, dk, dv = gradient(**self._packed(tensors), **self._options(options))
        return self.unpack(dq, QUERY), self.unpack(dk, KEY), self.unpack(dv, KEY)

    def _packed(self, tensors: Options) -> Options:
        packed = {}
        for name, x in tensors.items():
            if name.startswith("softmax"):
                packed[name] = self.pack_statistics(name, x)
            else:
                packed[name] = self.pack(name, x, KEY if name in ("key", "value") else QUERY)
        return packed

    def _options(self, options: Options) -> Options:
        options = {**options, "layout": "TND"}
        for name, lengths in zip(_NAMES, self.lengths, strict=True):
            options[name] = list(accumulate(lengths))
        for name in options.keys() & {"atten_mask", "attn_mask"}:
            options[name] = self.mask(name, options[name], options["sparse_mode"])
        for side, name in enumerate(("query_rope", "key_rope")):
            if options.get(name) is not None:
                options[name] = self.pack(name, options[name], side)
        options["pse_shift"] = self.bias(options["pse_shift"], options["pse_type"])
        return options


def padded_batch(
    function: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    layout: str,
    given: tuple[Lengths, Lengths],
) -> PaddedBatch | None:
    """The batch of a call outside TND that has lengths; None for any other call.

    None is also the answer for tensors that do not have the layout: the operator refuses them.
    """
    if not isinstance(layout, str) or layout == "TND" or layout not in _AXES:
        return None
    if all(x is None for x in given) or not have_scores(query, key, num_heads, layout):
        return None
    if not isinstance(value, Tensor) or value.dim() != query.dim():
        return None
    batch_axis, token_axis, head_axis = _AXES[layout]
    batch, heads = query.shape[batch_axis], whole(num_heads)
    key_heads = key.shape[head_axis]
    if head_axis == query.dim() - 1:
        size = query.shape[-1] // heads
        if not size or key_heads % size:
            return None
        key_heads //= size
    same = all(
        x.shape[batch_axis] == batch and x.shape[token_axis] == key.shape[token_axis]
        for x in (key, value)
    )
    if not same or not key_heads or value.shape[head_axis] % key_heads:
        return None
    tokens = query.shape[token_axis], key.shape[token_axis]
    queries, keys = (
        _counts((function, name), x, batch, room)
        for name, x, room in zip(_NAMES, given, tokens, strict=True)
    )
    lengths = queries, keys
    return PaddedBatch(function, layout, batch, (heads, key_heads), tokens, lengths)


def _counts(where: Where, given: Lengths, batch: int, room: int) -> Sequence[int]:
    """One count for each sequence, at most its tokens."""
    if given is None:
        return [room] * batch
    lengths = lengths_of(given, where=where)
    if lengths is None or not hasattr(lengths, "__iter__"):
        raise not_lengths(where, given)
    if len(lengths) == 0:  # as if none were given
        return [room] * batch
    if len(lengths) != batch:
        expected = f"one count of tokens per batch, {batch}, in a layout that is not TND"
        raise wrong(ValueError, *where, expected, shown(lengths))
    for i, length in enumerate(lengths):
        if not 0 <= length <= room:
            raise wrong(ValueError, *where, f"counts in 0..S = {room}", f"{length} at {i}")
    return lengths
