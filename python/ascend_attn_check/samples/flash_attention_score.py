"""Samples of flash_attention_score and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from ascend_attn_ops import reference
from ascend_attn_ops.reference.bounds.expected import (
    Expected,
)
from ascend_attn_ops.reference.bounds.flash_attention_score import GRADIENTS, expected_gradient
from ascend_attn_ops.reference.call import Outputs, Sample, lengths
from torch import Tensor

from .masks import compressed_mask, prefix_mask, random_mask
from .randomness import Random
from .record import Gradient, Operator
from .torch_npu_calls import torch_npu

_NAMED = 16  # lengths that the name of a case lists


@dataclass(frozen=True)
class FlashCase:
    layout: str = "BNSD"
    b: int = 2
    s: tuple[int, int] = (5, 7)  # Sq, Skv; all layouts but TND
    lengths: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # of the sequences: TND only
    tail: tuple[int, int] = (0, 0)  # tokens after the last sequence: TND only
    closed: bool = False  # whether a 0 closes the lists of lengths: TND only
    heads: tuple[int, int] = (4, 4)  # N, Nk
    d: tuple[int, int] = (12, 12)  # D, Dv
    mode: int | None = None  # None: no atten_mask
    mask: str = "BN"  # of a full mask: its shape ("BN", "B1", "11", "" or "sum" in TND) ...
    pattern: str = "random"  # ... and its content, see `full_mask`
    mask_dtype: torch.dtype = torch.bool
    pre: int = 2**31 - 1
    next: int = 2**31 - 1
    prefix: tuple[int, ...] | None = None
    # "full", "heads", "keys", "key" (one row for all batches), "rows" (of 1024); slopes "N", "BN"
    pse: str | None = None
    pse_type: int = 1
    start: tuple[int, int] | None = None  # q_start_idx, kv_start_idx
    keep_prob: float = 1.0
    sink: bool = False
    rope: int = 0  # Dr

    @property
    def id(self) -> str:
        def join(lengths: tuple[int, ...]) -> str:
            # The first lengths do for a pack of thousands.
            some = "+".join(map(str, lengths[:_NAMED]))
            return some if len(lengths) <= _NAMED else f"{some}+{len(lengths) - _NAMED}more"

        parts = [self.layout]
        if self.layout == "TND":
            parts += [f"L{join(self.lengths[0])}x{join(self.lengths[1])}"]
            parts += [f"tail{self.tail[0]}x{self.tail[1]}"] if any(self.tail) else []
            parts += ["closed"] if self.closed else []
        else:
            parts += [f"B{self.b}-S{self.s[0]}x{self.s[1]}"]
        parts += [f"H{self.heads[0]}" + (f"x{self.heads[1]}" if len(set(self.heads)) > 1 else "")]
        parts += [f"D{self.d[0]}" + (f"x{self.d[1]}" if len(set(self.d)) > 1 else "")]
        if self.mode is not None:
            parts += [f"mode{self.mode}"]
            parts += [f"mask{self.mask}-{self.pattern}"] if self.mode in (0, 1) else []
            parts += [f"pre{self.pre}"] if self.pre < 2**31 - 1 else []
            parts += [f"next{self.next}"] if self.next < 2**31 - 1 else []
        parts += [f"prefix{join(self.prefix)}"] if self.prefix else []
        parts += [f"pse{self.pse_type}{self.pse}"] if self.pse else []
        parts += [f"start{self.start[0]}x{self.start[1]}"] if self.start else []
        parts += [f"keep{self.keep_prob}"] if self.keep_prob < 1 else []
        parts += ["sink"] if self.sink else []
        parts += [f"rope{self.rope}"] if self.rope else []
        return "-".join(parts)

    @property
    def is_extended(self) -> bool:
        """Whether its gradient is that of an operator of its own."""
        return self.sink or self.rope > 0

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Sq, Skv of every sequence."""
        if self.layout == "TND":
            return [*zip(*self.lengths, strict=True), *([(0, 0)] if self.closed else [])]
        return [self.s] * self.b

    def shape(self, side: int, heads: int, d: int) -> tuple[int, ...]:
        b, s = self.b, self.s[side]
        return {
            "BNSD": (b, heads, s, d),
            "BSND": (b, s, heads, d),
            "BSH": (b, s, heads * d),
            "SBH": (s, b, heads * d),
            "TND": (sum(self.lengths[side]) + self.tail[side], heads, d),
        }[self.layout]


_TND = FlashCase(layout="TND", lengths=((3, 0, 6, 4), (5, 2, 9, 4)))
# More sequences than a launch on the NPU takes. Most have no queries, which take time to compute.
_LONG_PACK = replace(
    _TND, lengths=(((0,) * 66 + (1, 2)) * 31, ((0, 1) * 33 + (2, 2)) * 31), heads=(2, 1), d=(8, 8)
)
_ALIBI = FlashCase(b=1, s=(1030, 1030), heads=(2, 1), pse="rows", mode=3)

CASES = [
    FlashCase(),
    FlashCase(layout="BSND", s=(7, 5), mode=3),  # rows without keys
    FlashCase(layout="BSH", heads=(4, 2), mode=2),
    FlashCase(layout="SBH", s=(6, 9), heads=(3, 1), d=(24, 16), pse="full", pse_type=0),
    _TND,
    replace(_TND, heads=(4, 2), tail=(2, 3), mode=3),
    FlashCase(b=1, s=(130, 600), heads=(6, 2), d=(40, 40), mode=3),
    FlashCase(b=1, s=(300, 130), heads=(2, 1), d=(17, 9), mode=2),
    FlashCase(layout="BSH", b=1, s=(70, 600), mode=4, pre=50, next=3),
    FlashCase(layout="BSND", b=1, s=(200, 90), heads=(3, 3), mode=4, pre=150, next=-20),
    FlashCase(layout="SBH", s=(33, 80), heads=(2, 1), mode=4, pre=-5, next=20),
    FlashCase(s=(9, 12), mode=0),
    FlashCase(s=(9, 12), mode=0, mask="B1", pre=3, next=4, mask_dtype=torch.uint8),
    FlashCase(s=(9, 12), mode=1, mask="11", pattern="rows", pre=0, next=0),
    FlashCase(layout="BSND", s=(9, 12), mode=1, mask=""),
    FlashCase(b=1, s=(100, 560), mode=0, mask="", pattern="rows", pre=60, next=500),
    FlashCase(s=(6, 11), mode=5, prefix=(5, 9), mask="BN"),
    FlashCase(layout="BSND", s=(11, 6), mode=5, prefix=(0, 4), mask="B1"),  # rows without keys
    FlashCase(layout="BSH", s=(90, 560), mode=6, prefix=(490, 550), heads=(2, 1)),
    FlashCase(s=(6, 11), pse="heads"),
    FlashCase(s=(6, 11), pse="keys", mode=3),
    FlashCase(b=1, s=(90, 290), pse="full", mode=2, heads=(4, 2)),
    FlashCase(s=(6, 11), pse="heads", pse_type=0, mode=1, mask="B1"),
    _ALIBI,
    replace(_ALIBI, b=2, layout="BSND", pse_type=0, mode=2, heads=(1, 1)),
    replace(_ALIBI, mode=0, pattern="causal", mask="", next=0),
    replace(_ALIBI, layout="TND", lengths=((1030, 0, 1030), (1030, 0, 1030)), closed=True),
    FlashCase(b=3, s=(6, 11), pse="key", heads=(4, 2)),
    FlashCase(layout="BSH", s=(6, 11), pse="key", pse_type=0, mode=3),
    FlashCase(layout="SBH", s=(4, 5), d=(528, 520), mode=3),
    FlashCase(b=1, s=(3, 4), d=(768, 768), heads=(2, 1)),
    FlashCase(b=1, s=(3, 4), pse_type=0),  # on Ascend 950, and without limits
    FlashCase(s=(12, 12), pse="N", pse_type=2, mode=3),
    FlashCase(layout="BSH", s=(12, 12), pse="BN", pse_type=3),
    FlashCase(b=1, s=(560, 560), pse="N", pse_type=3, start=(7, 3), heads=(4, 2)),
    FlashCase(s=(12, 12), pse="BN", pse_type=2, start=(2, 40), mode=2),
    FlashCase(layout="BSND", s=(1, 200), d=(40, 24), mode=3),  # single rows, as in decoding
    FlashCase(b=1, s=(1, 83), heads=(5, 5), mode=0, pse="full", keep_prob=0.6),
    FlashCase(layout="BSH", s=(1, 90), mode=4, pre=50, next=-25),
    replace(_TND, lengths=((1, 0, 1, 1, 2), (70, 5, 0, 33, 9)), mode=3),
    FlashCase(s=(5, 9), keep_prob=0.7),
    FlashCase(layout="SBH", b=1, s=(70, 541), heads=(4, 2), keep_prob=0.5, mode=3),
    FlashCase(layout="BSND", s=(9, 9), keep_prob=0.9, pse="full", mode=0, d=(8, 5), heads=(2, 2)),
    replace(_TND, mode=0, mask="max", pre=1, tail=(1, 0)),
    replace(_TND, mode=1, mask="max", heads=(2, 1)),
    replace(_TND, mode=0, mask="sum", tail=(2, 0)),
    replace(_TND, mode=1, mask="sum", heads=(2, 2), keep_prob=0.5, closed=True, tail=(1, 2)),
    replace(_TND, mode=0, mask="sum", lengths=((0, 5), (4, 5))),  # longest Sq = sum Sq
    replace(_TND, mode=0, mask="BN", pre=2, next=3),
    replace(_TND, mode=1, mask="B1", heads=(4, 2), closed=True),
    replace(_TND, mode=0, mask="11", pattern="rows"),
    replace(_TND, mode=0, mask="", pre=0, next=2, lengths=((3, 4, 0), (3, 0, 2))),
    replace(_TND, mode=3, lengths=((3, 7, 6), (5, 2, 0))),  # rows without keys
    replace(_TND, mode=3, tail=(2, 3), closed=True),
    replace(_TND, tail=(4, 0), closed=True, pse="BN", pse_type=2, mode=2),
    replace(_TND, tail=(1, 5), closed=True, pse="full", mode=6, prefix=(4, 2, 7, 1, 0)),
    replace(_TND, mode=2, lengths=((5, 7), (3, 9))),
    replace(_TND, mode=4, pre=3, next=1, lengths=((5, 7), (3, 9))),
    replace(_TND, mode=6, prefix=(4, 2, 7, 1)),
    replace(_TND, mode=7, pre=9, next=-1, lengths=((3, 4, 0), (5, 9, 3))),
    replace(_TND, mode=8, pre=9, next=2, lengths=((0, 4, 5), (3, 6, 5))),
    replace(_TND, pse="full", pse_type=0, mode=3),
    replace(_TND, pse="keys", heads=(2, 1)),
    replace(_TND, pse="BN", pse_type=2, mode=2),
    replace(_TND, pse="N", pse_type=3, start=(0, 5)),
    replace(_TND, keep_prob=0.6, mode=3, tail=(3, 1)),
    FlashCase(b=0),
    FlashCase(s=(0, 7), mode=3),
    FlashCase(layout="BSND", s=(5, 0)),
    replace(_TND, lengths=((3, 2), (0, 4))),
    FlashCase(b=1, s=(1, 600), heads=(8, 1), d=(32, 32), mode=3),
    FlashCase(s=(0, 0), mode=4, pre=1, next=1),
    FlashCase(s=(0, 0), mode=1, mask="B1"),
    FlashCase(s=(3, 6), mode=6, prefix=(3, 6)),
    FlashCase(b=1, s=(65, 257), mode=3, heads=(7, 7), d=(33, 1), keep_prob=0.3),
    replace(_TND, lengths=((0, 0), (0, 0)), tail=(3, 2)),
    replace(_TND, lengths=((0, 4, 0, 5, 0), (0, 6, 2, 8, 0)), tail=(2, 2), mode=7, pre=8, next=0),
    replace(_TND, lengths=((0, 4, 3, 5, 0), (2, 6, 0, 8, 0)), tail=(2, 2), mode=8, pre=8, next=0),
    replace(_TND, lengths=((1, 1, 1), (4, 5, 3)), pse="keys"),
    replace(_TND, lengths=((2, 3), (3, 3)), tail=(1, 2), pse="keys", pse_type=0, keep_prob=0.4),
    FlashCase(sink=True),
    FlashCase(layout="BSND", s=(7, 5), mode=3, heads=(4, 1), sink=True),  # rows without keys
    FlashCase(layout="BSH", s=(70, 600), mode=4, pre=50, next=0, heads=(4, 2), sink=True),
    FlashCase(layout="SBH", s=(6, 9), d=(24, 16), pse="full", pse_type=0, mode=3, sink=True),
    FlashCase(s=(9, 12), mode=1, mask="11", pattern="rows", keep_prob=0.6, sink=True),
    FlashCase(layout="BSND", s=(1, 1200), d=(40, 24), mode=3, sink=True),  # split-KV
    FlashCase(layout="BSND", s=(5, 0), sink=True),
    replace(_TND, heads=(4, 2), tail=(2, 3), closed=True, mode=3, sink=True),
    replace(_TND, lengths=((3, 2, 4), (0, 4, 2)), mode=2, pse="keys", sink=True),
    FlashCase(d=(16, 16), rope=8, mode=3),
    FlashCase(layout="BSND", b=1, s=(70, 530), heads=(4, 2), d=(24, 17), rope=32, sink=True),
    FlashCase(layout="BSH", s=(1, 90), heads=(4, 4), rope=4, pse="full"),
    FlashCase(layout="SBH", s=(9, 7), heads=(4, 2), rope=5, mode=2, keep_prob=0.7),
    replace(_TND, d=(32, 32), rope=16, mode=3),
    replace(_TND, lengths=((3, 7), (5, 9)), d=(32, 32), rope=16, mode=3, sink=True),
    FlashCase(s=(9, 7), d=(128, 128), rope=64, mode=3, sink=True),
    replace(_TND, heads=(4, 2), d=(16, 16), rope=8, tail=(1, 4), closed=True, mode=4, pre=9, next=0,
            lengths=((3, 7, 0), (5, 9, 2)), sink=True),
    replace(_LONG_PACK, mode=7, pre=2, next=0, keep_prob=0.6),
]  # fmt: skip


def full_mask(case: FlashCase, random: Random) -> Tensor:
    sq, skv = (max(x) for x in zip(*case.sequences, strict=True)) if case.sequences else case.s
    batch = len(case.sequences)
    axes = {"BN": (batch, case.heads[0]), "B1": (batch, 1), "11": (1, 1)}.get(case.mask, ())
    if case.mask == "sum":
        sq, skv = (sum(x) for x in case.lengths)
    if case.mode == 5 and case.prefix is not None:
        return prefix_mask((*axes, sq, skv), case.prefix).to(case.mask_dtype)
    return random_mask((*axes, sq, skv), case.pattern, random).to(case.mask_dtype)


def pse_shift(case: FlashCase, random: Random) -> Tensor:
    n = case.heads[0]
    if case.pse_type >= 2:
        shape = (n,) if case.pse == "N" else (len(case.sequences), n)
        slopes = torch.rand(shape, generator=random.generator, dtype=torch.float64) + 0.1
        return slopes.float()
    if case.layout == "TND" and case.pse != "rows":
        keys = sum(case.lengths[1])
        pairs = sum(a * b for a, b in case.sequences)
        return random.normal(n * (keys if case.pse == "keys" else pairs))
    sq, skv = max(case.sequences) if case.layout == "TND" else case.s
    batch = len(case.sequences)
    return random.normal(
        *{
            "full": (batch, n, sq, skv),
            "heads": (1, n, sq, skv),
            "keys": (batch, n, 1, skv),
            "key": (1, n, 1, skv),
            "rows": (batch, n, 1024, skv),
        }[case.pse or "full"]
    )


def build(case: FlashCase, dtype: torch.dtype) -> Sample:
    random = Random(case.id, dtype)
    (n, nk), (d, dv) = case.heads, case.d
    inputs = {
        "query": random.normal(*case.shape(0, n, d)),
        "key": random.normal(*case.shape(1, nk, d)),
        "value": random.normal(*case.shape(1, nk, dv)),
    }
    options: dict[str, Any] = {
        "num_heads": n,
        "layout": case.layout,
        "scale_value": (d + case.rope) ** -0.5,
        "keep_prob": case.keep_prob,
        "pre_tokens": case.pre,
        "next_tokens": case.next,
        "pse_type": case.pse_type,
    }
    if case.mode is not None:
        options["sparse_mode"] = case.mode
        options["atten_mask"] = (
            full_mask(case, random)
            if case.mode in (0, 1, 5)
            else compressed_mask(case.mode, case.mask_dtype)
        )
    if case.layout == "TND":
        closing = [0] if case.closed else []
        options["actual_seq_lengths_query"] = lengths([*accumulate(case.lengths[0]), *closing])
        options["actual_seq_lengths_key"] = lengths([*accumulate(case.lengths[1]), *closing])
    if case.prefix:
        options["prefix"] = lengths(case.prefix)
    if case.pse:
        options["pse_shift"] = pse_shift(case, random)
    if case.start:
        options["q_start_idx"], options["kv_start_idx"] = ([x] for x in case.start)
    if case.keep_prob < 1:
        bits = n * sum(a * b for a, b in case.sequences)
        options["drop_mask"] = torch.randint(
            0, 256, (-(-bits // 8),), generator=random.generator, dtype=torch.uint8
        )
    if case.sink:
        # As large as scores are: some rows give the sink most of their weight.
        sink = 2 * torch.randn(n, generator=random.generator, dtype=torch.float64)
        options["sink"] = sink.to(torch.promote_types(dtype, torch.float32))
    if case.rope:
        options["query_rope"] = random.normal(*case.shape(0, n, case.rope))
        options["key_rope"] = random.normal(*case.shape(1, nk, case.rope))
    return Sample("flash_attention_score", f"{case.id}-{dtype}", inputs, options)


EXTENDED_GRADIENT = "_flash_attention_score_extended_grad"


def build_grad(case: FlashCase, dtype: torch.dtype) -> Sample:
    return gradient_of(build(case, dtype), Random(case.id, dtype))


def gradient_of(forward: Sample, random: Random) -> Sample:
    outputs = forward.call(reference)
    return gradient_call(forward, outputs, random.normal(*outputs[0].shape))


def gradient_call(forward: Sample, outputs: Outputs, d_out: Tensor) -> Sample:
    out, softmax_max, softmax_sum = outputs
    call = forward.of_gradient(
        dy=d_out, softmax_max=softmax_max, softmax_sum=softmax_sum, attention_in=out
    )
    return replace(call, operator=EXTENDED_GRADIENT) if is_extended(call) else call


def is_extended(sample: Sample) -> bool:
    return any(sample.options.get(name) is not None for name in ("sink", "query_rope"))


def backward(sample: Sample, outputs: Outputs, d_out: Tensor) -> Sequence[Any]:
    """By the arguments of the forward: None for what the gradient operator does not return."""
    gradients = gradient_call(sample, outputs, d_out).call(torch.ops.ascend)
    return [*gradients, *[None] * (len(GRADIENTS) - len(gradients))][:-1]


def expected_backward(sample: Sample, outputs: Outputs, d_out: Tensor) -> list[Expected]:
    bounds = expected_gradient(gradient_call(sample, outputs, d_out))
    absent = torch.zeros(0)
    return [*bounds, *[Expected(x, absent, absent) for x in GRADIENTS[len(bounds) :]]][:-1]


# One call in each layout and one of each form, with what Atlas A2 takes.
DEVICE_CASES = [
    case
    for case in CASES
    if case.keep_prob == 1
    # Other ropes are joined with query and key first.
    and (not case.rope or case.layout == "TND")
    and all(all(pair) for pair in case.sequences)
    and max(case.s) < 1000
    and (case.pse or case.pse_type == 1)
][::2]

FLASH_ATTENTION_SCORE = Operator(
    "flash_attention_score",
    CASES,
    build,
    Gradient(
        ("query", "key", "value", "sink", "query_rope", "key_rope"),
        ("out",),
        backward,
        expected=expected_backward,
    ),
    on_device=DEVICE_CASES.__contains__,
    # torch_npu draws a dropout mask of its own.
    torch_npu=lambda x: torch_npu("npu_fusion_attention_v2", {**x, "drop_mask": None}),
)

FLASH_ATTENTION_SCORE_GRAD = replace(
    FLASH_ATTENTION_SCORE,
    name="flash_attention_score_grad",
    cases=[case for case in CASES if not case.is_extended],
    build=build_grad,
    gradient=None,
    # The gradient wants a bias of one row for each batch; autograd repeats it.
    on_device=lambda case: case in DEVICE_CASES and not (case.pse == "key" and case.b > 1),
    # It draws the dropout mask of the forward once more: of so many bits.
    torch_npu=lambda x: torch_npu(
        "npu_fusion_attention_grad_v2",
        x,
        numels=0 if x.get("drop_mask") is None else 8 * x["drop_mask"].numel(),
    ),
)

OPERATORS = [FLASH_ATTENTION_SCORE, FLASH_ATTENTION_SCORE_GRAD]
