"""Valid calls of the sparse operators, and of sparse_flash_mla."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch
from ascend_attn_check.samples import (
    kv_quant_sparse_flash_attention,
    lightning_indexer,
    quant_lightning_indexer,
    randomness,
    sparse_flash_attention,
    sparse_flash_mla,
)
from ascend_attn_check.samples import sparse_lightning_indexer_grad_kl_loss as kl_loss
from ascend_attn_check.samples import sparse_lightning_indexer_kl_loss_grad as kl_loss_grad
from ascend_attn_check.samples.sparse import SparseCase
from ascend_attn_check.samples.sparse_flash_mla import MlaCase
from support.samples import Sample

from . import draw
from .calls import check, run
from .case import Case
from .memory import with_expanded

PATTERNS = ("random", "padded", "first", "hole", "duplicates", "future", "unread")
# Patterns with keys behind the lengths of a batch, which the gradients refuse.
_BEHIND = ("future", "unread")

# Not `future`: a row that attends to none of its keys has statistics of which no target comes.
LOSS_PATTERNS = (*(x for x in PATTERNS if x != "future"), "clamped", "partial")


Fuzzed = draw.seeded(SparseCase)
FuzzedMla = draw.seeded(MlaCase)
MLA_KEYS = ("ori_kv", "cmp_kv")


def sparse_case(
    random: Random, patterns: tuple[str, ...] = PATTERNS, loss: bool = False,
    gradient: bool = False, paged: bool = False, empty: bool = False,
) -> Fuzzed:  # fmt: skip
    """`loss`: what the loss does not have is left out. `empty`: an axis has no elements."""
    fields: dict[str, Any] = {"seed": random.getrandbits(32), "layout": "BSND"}
    large = random.random() < 0.1
    most = 140 if large else 16
    if random.random() < 0.4:
        fields["layout"] = "TND"
        count = random.randint(0, 2 if large else 4)
        fields["lengths"] = tuple(draw.lengths(random, count, most) for _ in range(2))
        fields["tail"] = random.choice(((0, 0), (0, 0), (2, 3), (0, 1), (1, 0)))
    else:
        b = random.choice((0, 1, 1, 1, 2, 2, 3)) if not large else 1
        s = draw.size(random, most), draw.size(random, most)
        fields |= {"b": b, "s": s}
        if random.random() < 0.4:
            fields["lengths"] = tuple(
                tuple(random.randint(0, s[side]) for _ in range(b)) for side in range(2)
            )
    if paged:
        if "lengths" not in fields:
            b, (s1, s2) = fields["b"], fields["s"]
            fields["lengths"] = (s1,) * b, tuple(random.randint(0, s2) for _ in range(b))
        # Patterns name keys that a batch has room for: here in the blocks of its longest sequence.
        fields["s"] = fields.get("s", (0, 0))[0], max(fields["lengths"][1], default=0)
        fields["page"] = random.choice((1, 2, 3, 7, 16, 16, 128))
    fields["heads"] = random.choice((1, 1, 2, 3, 4, 8, 16, 17, 33, 64) if not large else (1, 2, 64))
    # A loss without heads has no target.
    if not loss and random.random() < 0.03:
        fields["heads"] = 0
    fields["d"] = draw.size(random)
    fields["rope"] = random.choice((0, 0, 1, 5, 8, 16, 64))
    fields["k"] = max(1, draw.size(random, most))
    fields["mode"] = 3 if loss else random.choice((0, 3))
    if not loss:
        fields["block"] = random.choice((1, 1, 1, 2, 3, 8, 16, 64))
        fields["absorbed"] = random.random() < 0.3
    if gradient and "lengths" in fields:
        patterns = tuple(x for x in patterns if x not in _BEHIND)
    fields["pattern"] = random.choice(patterns)
    fields["selection_heads"] = random.random() < 0.8
    fields["index_heads"] = random.choice((0, 1, 2, 3, 4, 8, 9, 16))
    fields["index_d"] = draw.size(random)
    fields["statistics"] = paged and random.random() < 0.5
    case = Fuzzed(**fields)
    return without_elements(random, case, loss) if empty else case


def without_elements(random: Random, case: Fuzzed, loss: bool) -> Fuzzed:
    """No batch, tokens, heads or features, beside every optional tensor."""
    case = replace(case, rope=case.rope or 8)
    axes = ["batch", "queries", "keys", "index heads", "features"]
    if not loss:  # which has no target without heads
        axes.append("heads")
    match random.choice(axes):
        case "batch":
            lengths = None if case.lengths is None else ((), ())
            return replace(case, b=0, lengths=lengths)
        case "heads":
            return replace(case, heads=0)
        case "index heads":
            return replace(case, index_heads=0)
        case "features":
            return replace(case, d=0, index_d=0)
        case axis:
            side = int(axis == "keys")
            s, tail = list(case.s), list(case.tail)
            s[side] = tail[side] = 0
            lengths = case.lengths
            if lengths is not None:
                none = tuple(0 for _ in lengths[side])
                lengths = (none, lengths[1]) if side == 0 else (lengths[0], none)
            return replace(case, s=(s[0], s[1]), tail=(tail[0], tail[1]), lengths=lengths)


def compressed(random: Random, case: Fuzzed, empty: bool) -> Fuzzed:
    """The same queries over keys that each stand for several tokens."""
    case = replace(case, ratio=random.choice((2, 3, 4, 128)), block=1)
    if empty or random.random() < 0.5:
        sequences = case.b if case.lengths is None else len(case.lengths[0])
        residuals = tuple(random.randrange(case.ratio) for _ in range(sequences))
        return replace(case, residuals=residuals)
    s, lengths = (case.s[0], case.s[0] // case.ratio), case.lengths
    if lengths is not None:
        lengths = lengths[0], tuple(x // case.ratio for x in lengths[0])
    return replace(case, s=s, lengths=lengths)


def expanded(case: SparseCase) -> tuple[str, ...]:
    """Tensors that may be one row many times: not caches, whose first rows may be unread."""
    return ("query",) if case.page else ("query", "key", "value", "key_rope")


def forward_of(random: Random, case: Fuzzed, dtype: torch.dtype) -> Sample:
    """A call of sparse_flash_attention, of values of all sizes."""
    sample = sparse_flash_attention.build(case, dtype)
    if random.random() < 0.2:
        sample = draw.with_zeros(sample, ("query", "key", "query_rope", "key_rope"), random)
    if not case.absorbed:
        sample = draw.scaled(sample, ("value",), random)
    sample = with_expanded(sample, (*expanded(case), "query_rope"), random)
    return sample.replace(scale_value=draw.scale_value(random, sample.options["scale_value"]))


def over_int8(random: Random, case: Fuzzed, dtype: torch.dtype) -> Sample:
    sample = kv_quant_sparse_flash_attention.build(case, dtype)
    sample = draw.scaled(with_expanded(sample, ("query",), random), ("query",), random)
    return sample.replace(scale_value=draw.scale_value(random, sample.options["scale_value"]))


def sequence(random: Random, most: int, ratio: int, derived: bool) -> tuple[int, int, int, int]:
    """Queries, original keys, compressed keys and the residual of one sequence."""
    queries, keys = draw.size(random, most), draw.size(random, most)
    if derived:
        return queries, keys, keys // ratio, keys % ratio
    return queries, keys, draw.size(random, most), random.randrange(ratio)


def mla_case(random: Random, paged: bool = False, empty: bool = False) -> FuzzedMla:
    """`empty`: an axis has no elements."""
    large = random.random() < 0.1
    most = 140 if large else 16
    ratio = random.choice((1, 2, 3, 4, 4, 8, 128))
    derived = random.random() < 0.5
    count = random.randint(0, 1 if large else 4)
    each = [sequence(random, most, ratio, derived) for _ in range(count)]
    if empty and count:
        each[random.randrange(count)] = (0, 0, 0, 0)
    lengths = tuple(tuple(x[side] for x in each) for side in range(3))
    fields: dict[str, Any] = {
        "seed": random.getrandbits(32), "layout": random.choice(("BSND", "TND")),
        "kind": random.choice(("swa", "hca", "csa", "csa")), "b": count,
        "s": tuple(max(side, default=0) + random.randint(0, 2) for side in lengths),
        "lengths": lengths, "residual": None if derived else tuple(x[3] for x in each),
        "ratio": ratio,
        "heads": random.choice((1, 1, 2, 3, 4, 5, 8, 16, 17, 33, 64) if not large else (1, 2, 64)),
        "d": 0 if empty and random.random() < 0.3 else draw.head_size(random),
        "k": max(1, draw.size(random, most)), "mode": random.choice((0, 3, 4, 4, 4)),
        "cmp_mode": random.choice((0, 3, 3)), "left": random.choice((-1, 0, 1, 3, 127)),
        "right": random.choice((-1, 0, 0, 2)), "sink": random.random() < 0.7,
        "pattern": random.choice(PATTERNS), "selection_heads": random.random() < 0.8,
        "lse": random.random() < 0.8,
    }  # fmt: skip
    if paged:
        fields["page"] = random.choice((1, 2, 3, 7, 16, 16, 128))
    elif fields["layout"] == "TND":
        fields["tail"] = random.choice(((0, 0, 0), (2, 3, 1), (0, 1, 2), (1, 0, 0)))
    elif derived and random.random() < 0.5:
        queries, keys, compressed, _ = sequence(random, most, ratio, derived)
        fields |= {"s": (queries, keys, compressed), "lengths": None}
    return FuzzedMla(**fields)


def mla_call(random: Random, case: MlaCase, dtype: torch.dtype) -> Sample:
    sample = sparse_flash_mla.build(case, dtype)
    if random.random() < 0.2:
        sample = draw.with_zeros(sample, ("query", *MLA_KEYS), random)
    sample = draw.scaled(sample, ("sink",), random, exponents=(-6, 4))
    sample = with_expanded(sample, ("query",) if case.page else ("query", *MLA_KEYS), random)
    return sample.replace(scale_value=draw.scale_value(random, sample.options["scale_value"]))


def with_gradient(random: Random, empty: bool = False) -> Fuzzed:
    return sparse_case(random, gradient=True, empty=empty)


def mla_with_lse(random: Random, empty: bool = False) -> FuzzedMla:
    return replace(mla_case(random, empty=empty), lse=True)


def mla_gradient_of(forward: Sample, random: randomness.Random) -> Sample:
    outputs = forward.call(sparse_flash_mla.reference)
    d_out = random.normal(*outputs[0].shape)
    return sparse_flash_mla.gradient_call(forward, outputs, d_out)


def attention(
    random: Random, draw_case: Callable[..., Any] = sparse_case,
    call: Callable[..., Sample] = forward_of, **options: bool,
) -> str:  # fmt: skip
    case, dtype = draw_case(random, **options), random.choice(draw.DTYPES)
    sample = call(random, case, dtype)
    check(sample, run(sample, random, same_on_all_threads=True))
    return draw.label(case, dtype)


def attention_gradient(
    random: Random, draw_case: Callable[..., Any] = with_gradient,
    call: Callable[..., Sample] = forward_of,
    gradient_of: Callable[..., Sample] = sparse_flash_attention.gradient_of, **options: bool,
) -> str:  # fmt: skip
    case, dtype = draw_case(random, **options), random.choice(draw.DTYPES)
    sample = gradient_of(call(random, case, dtype), randomness.Random(case.id, dtype))
    sample = with_expanded(draw.scaled(sample, ("d_out",), random), ("d_out",), random)
    check(sample, run(sample, random, same_on_all_threads=False))
    return draw.label(case, dtype)


def indexer(
    random: Random, paged: bool = False, empty: bool = False, in_windows: bool = False,
    build: Callable[..., Sample] = lightning_indexer.build,
) -> str:  # fmt: skip
    case, dtype = sparse_case(random, paged=paged, empty=empty), random.choice(draw.DTYPES)
    if in_windows:
        case = compressed(random, case, empty)
    sample = draw.with_float32_weights(build(case, dtype), random)
    names = tuple(x for x in ("query", "key", "weights") if sample.tensors[x].is_floating_point())
    if random.random() < 0.3:
        sample = draw.with_zeros(sample, names, random)
    else:
        # No score may be more than float16 holds.
        sample = draw.scaled(sample, names, random, exponents=(-6, 1))
    sample = with_expanded(sample, (*expanded(case), "weights"), random)
    check(sample, run(sample, random, same_on_all_threads=True))
    return draw.label(case, dtype)


def indexer_gradient(random: Random, empty: bool = False) -> str:
    case, dtype = sparse_case(random, gradient=True, empty=empty), random.choice(draw.DTYPES)
    sample = draw.with_float32_weights(lightning_indexer.build_grad(case, dtype), random)
    names = ("query", "key", "weights", "d_values")
    sample = (
        draw.with_zeros(sample, names, random)
        if random.random() < 0.2
        else draw.scaled(sample, names, random)
    )
    check(sample, run(sample, random, same_on_all_threads=False))
    return draw.label(case, dtype)


def loss(random: Random, empty: bool = False) -> str:
    case = sparse_case(random, LOSS_PATTERNS, loss=True, gradient=True, empty=empty)
    if case.pattern == "partial" and case.layout == "TND":
        case = replace(case, pattern="clamped")
    dtype = random.choice(draw.DTYPES)
    sample = draw.with_float32_weights(kl_loss.build(case, dtype), random)
    tokens = sample.inputs["query"].shape[:-2]
    if empty or random.random() < 0.3:
        generator = torch.Generator().manual_seed(case.seed)
        weight = torch.rand(tokens, generator=generator) * (
            torch.rand(tokens, generator=generator) < 0.7
        )
        kind = random.choice((torch.bool, torch.float32, dtype))
        sample = sample.given(token_weight=weight.to(kind))
    check(sample, run(sample, random, same_on_all_threads=False))
    return f"{draw.label(case, dtype)}{' weighted' if 'token_weight' in sample.options else ''}"


def loss_gradient(random: Random, empty: bool = False) -> str:
    patterns = (*PATTERNS, "clamped")
    case = sparse_case(random, patterns, gradient=True, empty=empty)
    dtype = random.choice(draw.DTYPES)
    if random.random() < 0.7:
        case = compressed(random, case, empty)
    sample = draw.with_float32_weights(kl_loss_grad.build(replace(case, block=1), dtype), random)
    check(sample, run(sample, random, same_on_all_threads=False))
    return draw.label(case, dtype)


_MLA = partial(attention, draw_case=mla_case, call=mla_call)
_INT8_INDEXER = partial(indexer, build=quant_lightning_indexer.build)
_INT8 = partial(attention, call=over_int8)
_OPERATORS: dict[str, Callable[..., str]] = {
    "kv_quant_sparse_flash_attention": _INT8,
    "lightning_indexer": indexer,
    "lightning_indexer_grad": indexer_gradient,
    "quant_lightning_indexer": _INT8_INDEXER,
    "sparse_flash_attention": attention,
    "sparse_flash_attention_grad": attention_gradient,
    "sparse_flash_mla": _MLA,
    "sparse_flash_mla_grad": partial(
        attention_gradient, draw_case=mla_with_lse, call=mla_call, gradient_of=mla_gradient_of
    ),
    "sparse_lightning_indexer_grad_kl_loss": loss,
    "sparse_lightning_indexer_kl_loss_grad": loss_gradient,
}
CASES: dict[str, Case] = {
    **{f"valid/{name}": case for name, case in _OPERATORS.items()},
    **{f"valid/empty/{name}": partial(case, empty=True) for name, case in _OPERATORS.items()},
    "valid/paged/lightning_indexer": partial(indexer, paged=True),
    "valid/paged/quant_lightning_indexer": partial(_INT8_INDEXER, paged=True),
    "valid/paged/sparse_flash_attention": partial(attention, paged=True),
    "valid/paged/kv_quant_sparse_flash_attention": partial(_INT8, paged=True),
    "valid/paged/sparse_flash_mla": partial(_MLA, paged=True),
    "valid/empty/paged/sparse_flash_mla": partial(_MLA, paged=True, empty=True),
    "valid/compressed/lightning_indexer": partial(indexer, in_windows=True),
    "valid/compressed/paged/lightning_indexer": partial(indexer, in_windows=True, paged=True),
    "valid/empty/compressed/lightning_indexer": partial(indexer, in_windows=True, empty=True),
    "valid/empty/paged/lightning_indexer": partial(indexer, paged=True, empty=True),
    "valid/empty/paged/sparse_flash_attention": partial(attention, paged=True, empty=True),
}
