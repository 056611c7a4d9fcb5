"""Valid calls of flash_attention_score, its gradient, and prompt_flash_attention."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import ascend_attn_ops
import torch
from ascend_attn_check.samples import flash_attention_score, prompt_flash_attention, randomness
from ascend_attn_check.samples.flash_attention_score import FlashCase
from ascend_attn_check.samples.prompt_flash_attention import PromptCase
from support.attention import from_layout, to_layout
from support.samples import Sample
from torch import Tensor

from . import draw
from .calls import check, run
from .case import Case, Finding
from .memory import with_expanded

INT_MAX = 2**31 - 1
Pair = tuple[int, int]


FuzzedFlash = draw.seeded(FlashCase)
FuzzedPrompt = draw.seeded(PromptCase)


def head_counts(random: Random) -> Pair:
    key_heads = random.choice((1, 1, 2, 3))
    return key_heads * random.choice((1, 1, 2, 3, 8)), key_heads


def sizes(random: Random) -> Pair:
    kind = random.random()
    if kind < 0.02:
        return random.randint(1, 4), random.choice((511, 512, 513, 600))
    largest = 140 if kind < 0.12 else 16
    s = draw.size(random, largest)
    return s, s if random.random() < 0.3 else draw.size(random, largest)


def long_case(random: Random) -> FuzzedFlash:
    """With the bias of 1024 rows, which only longer sequences have."""
    n = random.randint(1025, 1100)
    mode = random.choice((0, 2, 3))
    fields: dict[str, Any] = {
        "heads": random.choice(((2, 1), (1, 1))), "d": (random.randint(1, 20),) * 2, "pse": "rows",
        "pse_type": random.randrange(2), "seed": random.getrandbits(32),
    }  # fmt: skip
    if mode > 0 and random.random() < 0.4:
        return FuzzedFlash(layout="TND", mode=mode, lengths=((n, 0), (n, 0)), **fields)
    layout = random.choice(("BNSD", "BSND", "BSH", "SBH"))
    masks = {"mode": mode, "mask": "", "pattern": "causal", "next": 0} if mode == 0 else {}
    return FuzzedFlash(layout=layout, b=1, s=(n, n), **{"mode": mode, **masks, **fields})


def flash_case(random: Random) -> FuzzedFlash:
    if random.random() < 0.004:
        return long_case(random)
    fields: dict[str, Any] = {
        "seed": random.getrandbits(32),
        "layout": random.choice(("BNSD", "BSND", "BSH", "SBH", "TND", "TND")),
        "heads": head_counts(random), "mask_dtype": random.choice((torch.bool, torch.uint8)),
    }  # fmt: skip
    d = draw.head_size(random)
    fields["d"] = d, d if random.random() < 0.5 else random.randint(1, d)
    if fields["layout"] == "TND":
        pairs = [
            (0, 0) if random.random() < 0.1 else sizes(random) for _ in range(random.randint(1, 4))
        ]
        fields["lengths"] = tuple(x for x, _ in pairs), tuple(x for _, x in pairs)
        fields["tail"] = random.choice(((0, 0), (0, 0), (2, 3), (0, 1), (1, 0)))
        fields["closed"] = random.random() < 0.2
    else:
        fields["b"] = random.choice((0, 1, 1, 2, 2, 3))
        fields["s"] = sizes(random)
    sequences = FlashCase(**{k: x for k, x in fields.items() if k != "seed"}).sequences
    fields |= mask_fields(random, fields["layout"], sequences)
    if random.random() < 0.4:
        equal = fields["layout"] == "TND" or fields["s"][0] == fields["s"][1]
        fields |= bias_fields(random, fields["layout"], sequences, equal)
    if random.random() < 0.25:
        fields["keep_prob"] = random.choice((0.1, 0.5, 0.7, 0.9))
    # By the seed of the numbers, so that older findings keep their calls.
    extra = Random(fields["seed"])
    fields["sink"] = extra.random() < 0.25
    fields["rope"] = extra.choice((1, 4, 8, 16, 33)) if extra.random() < 0.2 else 0
    return FuzzedFlash(**fields)


def mask_fields(random: Random, layout: str, sequences: list[Pair]) -> dict[str, Any]:
    """A mode, and what goes with it; none where the mode has no band for these sequences."""
    packed = layout == "TND"
    mode = random.choice((None, 0, 1, 2, 3, 4, 6, 7, 8) if packed else (None, 0, 1, 2, 3, 4, 5, 6))
    fields: dict[str, Any] = {"mode": mode}
    if mode in (0, 1):
        fields["pattern"] = random.choice(("random", "rows", "causal"))
        fields["mask"] = random.choice(("BN", "B1", "11", "", "sum") if packed else
                                       ("BN", "B1", "11", ""))  # fmt: skip
    filled = [x for x in sequences if all(x)]
    if mode in (0, 4) and random.random() < 0.7:
        band = band_of(random, mode, packed, filled or sequences)
        if band is None:
            return {"mode": random.choice((2, 3))}
        fields["pre"], fields["next"] = band
    if mode in (5, 6):
        if packed and not sequences:
            return {"mode": 3}
        fields["mask"] = random.choice(("BN", "B1"))
        fields["prefix"] = tuple(
            random.randint(0 if sq > skv else skv - sq, skv) for sq, skv in sequences
        )
        if not sequences:
            return {"mode": 3}
    if mode in (7, 8):
        sq, skv = (filled[-1] if mode == 7 else filled[0]) if filled else (0, 0)
        least = 0 if mode == 7 else sq - skv
        fields["pre"] = skv + random.randint(0, 3)
        fields["next"] = least - random.randint(0, 2) if mode == 7 else least + random.randint(0, 3)
    return fields


def band_of(random: Random, mode: int, packed: bool, sequences: list[Pair]) -> Pair | None:
    """A pair of pre and next that leaves every sequence a band."""
    if not sequences:
        return None
    for _ in range(10):
        pre, next_ = (random.randint(-4, 12) for _ in range(2))
        fitting = [
            leaves_a_band(
                pre + (sq - skv if mode == 4 else 0), next_ + (skv - sq if mode == 4 else 0),
                sq, skv,
            )
            and not (packed and mode == 0 and (next_ < 0 or skv + pre < sq))
            for sq, skv in sequences
        ]  # fmt: skip
        if all(fitting):
            return pre, next_
    return None


def leaves_a_band(pre: int, next_: int, sq: int, skv: int) -> bool:
    if pre < 0:
        return next_ >= -pre and -pre < skv
    return next_ >= 0 or (-next_ <= pre and -next_ < sq)


def bias_fields(random: Random, layout: str, sequences: list[Pair], slopes: bool) -> dict[str, Any]:
    """`slopes`: whether the lengths are such that they may be slopes."""
    packed = layout == "TND"
    pse_type = random.randrange(4 if slopes else 2)
    if pse_type >= 2:
        start = random.choice((None, (0, 0), (3, 5), (7, 0), (0, 40)))
        return {
            "pse": random.choice(("N", "BN")) if sequences else "N", "pse_type": pse_type,
            "start": start,
        }  # fmt: skip
    kinds = ("full", "keys") if packed else ("full", "heads", "keys", "key")
    if packed and sum(sq * skv for sq, skv in sequences) == sum(skv for _, skv in sequences):
        kinds = ("full",)  # the size of the bias says which one it is
    return {"pse": random.choice(kinds), "pse_type": pse_type}


def flash_call(random: Random, case: FuzzedFlash, dtype: torch.dtype) -> Sample:
    sample = flash_attention_score.build(case, dtype)
    if random.random() < 0.2:
        sample = draw.with_zeros(sample, ("query", "key"), random)
    sample = draw.scaled(sample, ("value",), random)
    sample = with_expanded(sample, ("query", "key", "value"), random)
    return sample.replace(scale_value=draw.scale_value(random, sample.options["scale_value"]))


def attention(random: Random) -> str:
    case, dtype = flash_case(random), random.choice(draw.DTYPES)
    sample = flash_call(random, case, dtype)
    check(sample, run(sample, random, same_on_all_threads=True))
    return draw.label(case, dtype)


def check_gradient(random: Random, forward: Sample, case: FuzzedFlash, dtype: torch.dtype) -> None:
    sample = flash_attention_score.gradient_of(forward, randomness.Random(case.id, dtype))
    sample = with_expanded(draw.scaled(sample, ("dy",), random), ("dy",), random)
    actual = run(sample, random, same_on_all_threads=False)
    check(sample, actual, flash_attention_score.expected_gradient(sample))


def attention_gradient(random: Random) -> str:
    case, dtype = flash_case(random), random.choice(draw.DTYPES)
    if case.pse == "key" and case.b > 1:  # the gradient wants a bias for each batch
        return "no such case"
    check_gradient(random, flash_call(random, case, dtype), case, dtype)
    return draw.label(case, dtype)


def empty(random: Random) -> str:
    """No batch, no queries or no keys, beside whatever else may be given."""
    case = long_case(random) if random.random() < 0.2 else flash_case(random)
    if case.mode not in (None, 2, 3):  # the others have bands, prefixes or masks of the lengths
        case = replace(case, mode=3, prefix=None, pre=INT_MAX, next=INT_MAX)
    if case.layout == "TND":
        side, none = random.randrange(2), tuple(0 for _ in case.lengths[0])
        lengths = (none, case.lengths[1]) if side == 0 else (case.lengths[0], none)
        case = replace(case, lengths=lengths, pse=None, pse_type=1)
    elif case.pse == "rows" or random.random() < 0.4:
        case = replace(case, b=0)
    else:
        s = (0, case.s[1]) if random.randrange(2) else (case.s[0], 0)
        # Slopes want as many queries as keys.
        case = replace(case, s=s, **({"pse": None, "pse_type": 1} if case.pse_type > 1 else {}))
    return forward_and_backward(random, case, random.choice(draw.DTYPES))


def forward_and_backward(random: Random, case: FuzzedFlash, dtype: torch.dtype) -> str:
    sample = flash_call(random, case, dtype)
    check(sample, run(sample, random, same_on_all_threads=True))
    check_gradient(random, sample, case, dtype)
    return draw.label(case, dtype)


def prompt_case(random: Random, quantized: bool = True) -> FuzzedPrompt:
    s = sizes(random)
    b = random.choice((0, 1, 1, 2, 2, 3))
    fields: dict[str, Any] = {
        "seed": random.getrandbits(32),
        "layout": random.choice(("BNSD", "BSND", "BSH", "BNSD_BSND")), "b": b, "s": s,
        "heads": head_counts(random), "d": draw.head_size(random),
        "mask_dtype": random.choice((torch.bool, torch.uint8, torch.int8)),
        "mode": random.choice((0, 0, 1, 2, 3, 4)),
    }  # fmt: skip
    if fields["mode"] == 1 or (fields["mode"] == 0 and random.random() < 0.7):
        fields["mask"] = random.choice(("S", "BS", "1S", "B1S", "11S"))
        if random.random() < 0.3:
            fields["larger"] = random.randint(0, 5), random.randint(0, 20)
    if random.random() < 0.4:
        fields["lengths"] = tuple(valid_lengths(random, b, most) for most in s)
    if fields["mode"] in (0, 4) and random.random() < 0.7:
        fields["pre"], fields["next"] = (random.randint(0, 12) for _ in range(2))
    kind = random.random()
    if quantized and kind < 0.45:
        fields["inputs"] = "int8" if kind < 0.3 else "float"
        fields["output"] = "int8" if kind > 0.15 else "float"
        fields["deq_dtype"] = random.choice((torch.float32, torch.uint64))
        if fields["output"] == "int8":
            fields["scale2"] = random.choice(("tensor", "channel"))
            if fields["scale2"] == "channel":
                fields["d"] = random.choice((32, 64, 96))
            fields["scale2_as_query"] = fields["inputs"] == "float" and random.random() < 0.3
            # With an offset no row may be without keys.
            fields["offset"] = fields["mode"] in (1, 2) and random.random() < 0.5
    return FuzzedPrompt(**fields)


def valid_lengths(random: Random, batches: int, most: int) -> tuple[int, ...] | None:
    count = random.choice((0, 1, batches, batches))
    if random.random() < 0.3 or (count < batches and count > 1):
        return None
    return tuple(random.randint(0, most) for _ in range(count))


def prompt_without_elements(random: Random) -> FuzzedPrompt:
    """No batch, no queries or no keys, beside whatever else may be given."""
    case = prompt_case(random)
    if random.random() < 0.4:
        return replace(case, b=0, lengths=tuple(x and () for x in case.lengths))
    side = random.randrange(2)
    s = (0, case.s[1]) if side == 0 else (case.s[0], 0)
    lengths = tuple(
        None if x is None else tuple(min(n, most) for n in x)
        for x, most in zip(case.lengths, s, strict=False)
    )
    # With an offset no row may be without keys.
    return replace(case, s=s, lengths=lengths, offset=case.offset and side == 0)


def prompt(random: Random, empty: bool = False) -> str:
    case = prompt_without_elements(random) if empty else prompt_case(random)
    dtype = random.choice(draw.DTYPES)
    sample = prompt_flash_attention.build(case, dtype)
    sample = sample.replace(scale_value=draw.scale_value(random, sample.options["scale_value"]))
    if case.inputs == "float" and case.output == "float":
        sample = draw.scaled(sample, ("value",), random)
    sample = with_expanded(sample, ("query", "key", "value"), random)
    check(sample, run(sample, random, same_on_all_threads=True))
    if case.inputs == "int8" or case.output == "int8":
        inputs = case.inputs if case.inputs == "int8" else draw.name_of(dtype)
        return f"{case.layout} mode {case.mode} {inputs} to {case.output}"
    return draw.label(case, dtype)


def padded_case(random: Random) -> FuzzedFlash:
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


def scores_beside(
    case: FuzzedFlash, scores: Tensor, rooms: Pair, *, per_key: bool = False
) -> Tensor:
    """Flat scores of a pack as (B, N, Sq or 1, Skv), with NaN in the padding."""
    heads = case.heads[0]
    rows = 1 if per_key else rooms[0]
    batches = scores.new_full((len(case.sequences), heads, rows, rooms[1]), torch.nan)
    begin = 0
    for batch, (queries, keys) in zip(batches, case.sequences, strict=True):
        shape = (heads, 1 if per_key else queries, keys)
        size = heads * shape[1] * keys
        batch[:, : shape[1], :keys] = scores[begin : begin + size].view(shape)
        begin += size
    return batches


def drop_mask_beside(case: FuzzedFlash, drop_mask: Tensor, rooms: Pair) -> Tensor:
    """The bits of a pack as those of (B, N, Sq, Skv)."""
    powers = 1 << torch.arange(8)
    bits = (drop_mask[:, None] & powers != 0).flatten().float()
    batches = scores_beside(case, bits, rooms).flatten() == 1
    eights = torch.nn.functional.pad(batches, (0, -batches.numel() % 8)).view(-1, 8)
    return (eights * powers).sum(1).byte()


def padded_attention(random: Random) -> str:
    """With the lengths of padded batches and broadcast masks, which the public function takes.

    The expected results are those of the pack without the padding, of which a case is made.
    """
    case, dtype = padded_case(random), random.choice(draw.DTYPES)
    pack = flash_attention_score.build(case, dtype)
    layout = random.choice(("BNSD", "BSND", "BSH", "SBH"))
    rooms = tuple(max(x) + random.randint(1, 3) for x in case.lengths)
    options: dict[str, Any] = {**pack.options, "layout": layout}
    for name, side in (("query", 0), ("key", 1), ("value", 1), ("query_rope", 0), ("key_rope", 1)):
        x = pack.arguments.get(name)
        if x is not None:
            batches = padded(x, case.lengths[side], rooms[side])
            options[name] = to_layout(batches.transpose(1, 2), layout)
    for name, lengths in zip(("query", "key"), case.lengths, strict=True):
        options[f"actual_seq_lengths_{name}"] = random.choice((list, torch.tensor))(lengths)
    if case.mode in (0, 1):
        pack_mask, options["atten_mask"] = mask_beside(random, options["atten_mask"], rooms)
        pack = pack.replace(atten_mask=pack_mask)
    if case.pse and case.pse_type < 2:
        options["pse_shift"] = scores_beside(
            case, options["pse_shift"], rooms, per_key=case.pse == "keys"
        )
    if options.get("drop_mask") is not None:
        options["drop_mask"] = drop_mask_beside(case, options["drop_mask"], rooms)
    inputs = {name: options.pop(name) for name in ("query", "key", "value")}
    call = Sample("flash_attention_score", f"padded {pack.id}", inputs, options)
    with warnings.catch_warnings():
        # A mask with axes of 1 may mask every key.
        warnings.simplefilter("ignore")
        out, *statistics = call.call(ascend_attn_ops)
    queries = case.lengths[0]
    batches = from_layout(out, layout, case.heads[0]).transpose(1, 2)
    actual = without_padding(batches, queries)
    check(pack, (actual, *(statistics_of_pack(x, queries) for x in statistics)))
    return draw.label(replace(case, layout=layout), dtype)


CASES: dict[str, Case] = {
    "valid/flash_attention_score": attention,
    "valid/padded/flash_attention_score": padded_attention,
    "valid/flash_attention_score_grad": attention_gradient,
    "valid/empty/flash_attention_score": empty, "valid/prompt_flash_attention": prompt,
    "valid/empty/prompt_flash_attention": partial(prompt, empty=True),
}  # fmt: skip
