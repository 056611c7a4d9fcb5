"""Valid calls of flash_attention_score with the lengths of padded batches and broadcast masks.

The public function takes both. The expected results are those of the pack without the padding, of
which a case is made.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from random import Random
from typing import Any

import ascend_attn_ops
import torch
from ascend_attn_ops.check.samples import flash_attention_score
from support.samples import Sample
from torch import Tensor

from . import draw
from .calls import check
from .case import Case, Finding
from .valid_dense import FuzzedFlash, flash_case, label

Pair = tuple[int, int]


def pack_case(random: Random) -> FuzzedFlash:
    """A pack of what padded batches may have."""
    while True:
        case = flash_case(random)
        if case.layout == "TND" and not case.closed and case.mode not in (7, 8):
            break
    case = replace(case, tail=(0, 0), pse=None if case.pse == "rows" else case.pse)
    if case.pse is None:
        case = replace(case, pse_type=1, start=None)
    return replace(case, mask="B1") if case.mask == "sum" else case


def padded(x: Tensor, lengths: tuple[int, ...], room: int) -> Tensor:
    """(T, N, D) as (B, S, N, D), with NaN in the padding."""
    batches = x.new_full((len(lengths), room, *x.shape[1:]), torch.nan)
    for batch, part in zip(batches, x.split(list(lengths)), strict=True):
        batch[: part.shape[0]] = part
    return batches


def to_layout(x: Tensor, layout: str) -> Tensor:
    """(B, S, N, D) in another layout."""
    if layout == "BNSD":
        return x.transpose(1, 2)
    x = x if layout == "BSND" else x.flatten(2)
    return x.transpose(0, 1) if layout == "SBH" else x


def from_layout(x: Tensor, layout: str, heads: int) -> Tensor:
    if layout == "BNSD":
        return x.transpose(1, 2)
    x = x.transpose(0, 1) if layout == "SBH" else x
    return x if layout == "BSND" else x.unflatten(2, (heads, -1))


def without_padding(x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """(B, S, ...) without the padding, which must be zero."""
    for batch, length in zip(x, lengths, strict=True):
        if batch[length:].any():
            raise Finding("results in the padding are not zero")
    return torch.cat([batch[:length] for batch, length in zip(x, lengths, strict=True)])


def statistics_of_pack(x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    rows = without_padding(x.transpose(1, 2), lengths)
    parts = [part.transpose(0, 1).reshape(part.shape) for part in rows.split(list(lengths))]
    return torch.cat(parts)


def mask_beside(random: Random, mask: Tensor, rooms: Pair) -> tuple[Tensor, Tensor]:
    """The mask of a pack, and that of its padded batch, in which an axis may be 1."""
    narrow = mask
    if mask.dim() == 4:
        for axis in range(4):
            if random.random() < 0.3:
                narrow = narrow.narrow(axis, 0, min(1, narrow.shape[axis]))
        mask = narrow.expand(mask.shape)
    sides = [
        0 if narrow.dim() == 4 and x == 1 else room - x
        for x, room in zip(narrow.shape[-2:], rooms, strict=True)
    ]
    return mask, torch.nn.functional.pad(narrow, (0, sides[1], 0, sides[0]), value=1)


def bias_beside(case: FuzzedFlash, pse: Tensor, rooms: Pair) -> Tensor:
    """A flat bias as (B, N, Sq or 1, Skv), with NaN in the padding."""
    heads = case.heads[0]
    per_key = case.pse == "keys"
    rows = 1 if per_key else rooms[0]
    bias = pse.new_full((len(case.sequences), heads, rows, rooms[1]), torch.nan)
    begin = 0
    for batch, (queries, keys) in zip(bias, case.sequences, strict=True):
        shape = (heads, 1 if per_key else queries, keys)
        size = heads * shape[1] * keys
        batch[:, : shape[1], :keys] = pse[begin : begin + size].view(shape)
        begin += size
    return bias


def attention(random: Random) -> str:
    case, dtype = pack_case(random), random.choice(draw.DTYPES)
    pack = flash_attention_score.build(case, dtype)
    layout = random.choice(("BNSD", "BSND", "BSH", "SBH"))
    rooms = tuple(max(x) + random.randint(1, 3) for x in case.lengths)
    options: dict[str, Any] = {**pack.options, "layout": layout}
    for name, side in (("query", 0), ("key", 1), ("value", 1), ("query_rope", 0), ("key_rope", 1)):
        x = pack.arguments.get(name)
        if x is not None:
            options[name] = to_layout(padded(x, case.lengths[side], rooms[side]), layout)
    for name, lengths in zip(("query", "key"), case.lengths, strict=True):
        options[f"actual_seq_lengths_{name}"] = random.choice((list, torch.tensor))(lengths)
    if case.mode in (0, 1):
        pack_mask, options["atten_mask"] = mask_beside(random, options["atten_mask"], rooms)
        pack = pack.replace(atten_mask=pack_mask)
    if case.pse and case.pse_type < 2:
        options["pse_shift"] = bias_beside(case, options["pse_shift"], rooms)
    inputs = {name: options.pop(name) for name in ("query", "key", "value")}
    call = Sample("flash_attention_score", f"padded {pack.id}", inputs, options)
    with warnings.catch_warnings():
        # A mask with axes of 1 may mask every key.
        warnings.simplefilter("ignore")
        out, *statistics = call.call(ascend_attn_ops)
    queries = case.lengths[0]
    actual = without_padding(from_layout(out, layout, case.heads[0]), queries)
    check(pack, (actual, *(statistics_of_pack(x, queries) for x in statistics)))
    return label(replace(case, layout=layout), dtype)


CASES: dict[str, Case] = {"valid/padded/flash_attention_score": attention}
