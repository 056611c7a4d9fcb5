"""Samples of prompt_flash_attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from ascend_attn_ops.reference.call import Sample
from ascend_attn_ops.reference.call import lengths as as_lengths
from torch import Tensor

from .masks import INT32_MAX, compressed_mask, inference_mask, parts_of_id
from .randomness import Random
from .record import Operator
from .torch_npu_calls import torch_npu


@dataclass(frozen=True)
class PromptCase:
    layout: str = "BNSD"
    b: int = 2
    s: tuple[int, int] = (5, 7)  # Sq, Skv
    lengths: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = (None, None)
    heads: tuple[int, int] = (4, 4)  # N, Nk
    d: int = 12
    mode: int = 0
    mask: str = ""  # of a full mask, its leading axes: "S", "BS", "1S", "B1S" or "11S"
    larger: tuple[int, int] = (0, 0)  # rows and columns more than there are scores
    mask_dtype: torch.dtype = torch.bool
    pre: int = INT32_MAX
    next: int = INT32_MAX
    inputs: str = "float"  # or "int8"
    output: str = "float"  # or "int8"
    deq_dtype: torch.dtype = torch.float32
    scale2: str = "tensor"  # or "channel"
    scale2_as_query: bool = False  # in a half type, that of the inputs
    offset: bool = False

    @property
    def id(self) -> str:
        n, nk = self.heads
        parts = [f"{self.layout}-B{self.b}-S{self.s[0]}x{self.s[1]}"]
        parts += [f"H{n}" + (f"x{nk}" if n != nk else ""), f"D{self.d}"]
        for side, lengths in zip("qk", self.lengths, strict=True):
            parts += [f"L{side}{'+'.join(map(str, lengths))}"] if lengths is not None else []
        band = self.pre, self.next
        parts += parts_of_id(self.mode, self.mask, self.larger, self.mask_dtype, band)
        parts += [f"{self.inputs}-to-{self.output}"] if "int8" in (self.inputs, self.output) else []
        parts += ["uint64"] if self.deq_dtype == torch.uint64 else []
        parts += [f"per-{self.scale2}"] if self.output == "int8" else []
        parts += ["scale-as-query"] if self.scale2_as_query else []
        parts += ["offset"] if self.offset else []
        return "-".join(parts)

    def shape(self, side: int) -> tuple[int, ...]:
        b, s, heads, d = self.b, self.s[side], self.heads[side], self.d
        return {"BSH": (b, s, heads * d), "BSND": (b, s, heads, d)}.get(
            self.layout, (b, heads, s, d)
        )


_TO_INT8 = PromptCase(s=(20, 40), heads=(2, 2), d=32, output="int8")
_FROM_INT8 = PromptCase(s=(20, 40), heads=(2, 2), d=32, inputs="int8")
_BOTH = replace(_FROM_INT8, output="int8")

CASES = [
    PromptCase(),
    PromptCase(layout="BSH", heads=(4, 2), mask="11S", next=1),
    PromptCase(layout="BSND", s=(7, 5), heads=(3, 1), mask="BS"),
    PromptCase(layout="BNSD_BSND", s=(9, 11), heads=(6, 3), mode=3),
    # Sizes on both sides of the blocks of rows and keys.
    PromptCase(b=1, s=(130, 700), heads=(6, 2), d=40, mode=3),
    PromptCase(layout="BSND", b=1, s=(300, 130), heads=(2, 1), d=17, mode=2),
    PromptCase(layout="BSH", b=1, s=(65, 257), heads=(3, 3), d=33),
    PromptCase(b=1, s=(3, 70), heads=(64, 1), d=16, mode=3),
    PromptCase(layout="BSH", b=1, s=(2, 9), heads=(128, 2), d=8, mode=2),
    PromptCase(layout="BNSD_BSND", b=1, s=(1, 600), heads=(8, 1), d=32, mode=3),
    PromptCase(b=1, s=(20, 30), heads=(2, 1), d=200),
    # Lengths.
    PromptCase(s=(9, 12), lengths=((4,), None), mask="S"),
    PromptCase(layout="BSH", b=3, s=(9, 12), lengths=((9, 0, 4), (12, 7, 0))),
    PromptCase(layout="BSND", b=3, s=(9, 12), lengths=(None, (5, 12, 0, 99, -1)), mode=3),
    PromptCase(layout="BNSD_BSND", b=3, s=(90, 610), lengths=((90, 33, 1), (591, 610, 2)), mode=3),
    PromptCase(b=3, s=(600, 590), heads=(4, 1), lengths=((580, 33, 64), (571, 512, 20)), mode=2),
    PromptCase(layout="BSH", b=2, s=(70, 600), lengths=((70, 50), (540, 61)), mode=4,
               pre=30, next=9),
    PromptCase(s=(9, 12), lengths=((), ()), mask="B1S", next=0),
    # Masks.
    PromptCase(s=(9, 12), mask="S", next=0),
    PromptCase(s=(9, 12), mask="BS", mask_dtype=torch.int8, pre=3, next=4),
    PromptCase(s=(9, 12), mask="1S", mask_dtype=torch.uint8, mode=1, pre=0, next=0),
    PromptCase(layout="BSND", s=(9, 12), mask="B1S", larger=(3, 20), mode=1),
    PromptCase(layout="BSH", s=(9, 27), mask="11S", larger=(0, 5), lengths=((7,), (21,))),
    PromptCase(b=1, s=(100, 590), mask="S", larger=(28, 50), pre=60, next=480),
    PromptCase(b=1, s=(10, 12), mask="BS", mode=0, pre=20, next=-4),
    PromptCase(b=1, s=(10, 12), mask="BS", mode=0, pre=-4, next=20),
    PromptCase(layout="BSND", s=(200, 90), heads=(3, 3), mode=4, pre=150, next=-20),
    PromptCase(s=(33, 80), heads=(2, 1), mode=4, pre=-5, next=20, mask_dtype=torch.int8),
    PromptCase(layout="BSH", s=(40, 25), mode=3, mask_dtype=torch.uint8),  # rows without keys
    # Nothing to do.
    PromptCase(b=0),
    PromptCase(s=(0, 7), mode=3),
    PromptCase(layout="BSND", s=(5, 0)),
    PromptCase(layout="BSH", s=(5, 0), heads=(2, 2), d=32, output="int8", offset=True),
    # Every row of the quantisation table.
    _TO_INT8,
    replace(_TO_INT8, layout="BSH", heads=(4, 2), offset=True, mask="B1S"),
    replace(_TO_INT8, layout="BSND", scale2="channel", mode=3),
    replace(_TO_INT8, layout="BNSD_BSND", scale2="channel", offset=True, mode=2,
            scale2_as_query=True),
    replace(_TO_INT8, scale2_as_query=True, lengths=((9, 20), (40, 11)), d=20, b=2),
    _FROM_INT8,
    replace(_FROM_INT8, layout="BSH", heads=(4, 1), deq_dtype=torch.uint64, mode=3),
    replace(_FROM_INT8, layout="BSND", s=(130, 620), mode=4, pre=400, next=5, b=1),
    replace(_FROM_INT8, layout="BNSD_BSND", mask="B1S", larger=(12, 8), next=30, d=33,
            lengths=((3, 20), (33, 9))),
    _BOTH,
    replace(_BOTH, layout="BSH", scale2="channel", offset=True, deq_dtype=torch.uint64),
    replace(_BOTH, layout="BSND", scale2="channel", heads=(4, 2), mode=3, b=1, s=(70, 590)),
    replace(_BOTH, layout="BNSD_BSND", offset=True, mask="S", mode=1, d=17, lengths=((9,), (30,))),
]  # fmt: skip


def full_mask(case: PromptCase, random: Random) -> Tensor:
    rows, keys = zip(case.s, case.larger, strict=True)
    return inference_mask(case.mask, case.b, rows, keys, random).to(case.mask_dtype)


def deq_scale(value: float, dtype: torch.dtype) -> Tensor:
    """Returns a scale; in a uint64, the ignored upper half is not zero."""
    scale = torch.tensor([value])
    if dtype == torch.float32:
        return scale
    bits = int(scale.view(torch.int32).item()) & 0xFFFFFFFF
    return torch.tensor([bits | 5 << 32], dtype=torch.uint64)


def quantization(case: PromptCase, dtype: torch.dtype, random: Random) -> dict[str, Tensor]:
    """Scales for inputs and outputs of about unit scale."""
    options: dict[str, Tensor] = {}
    if case.inputs == "int8":
        options["deq_scale1"] = deq_scale(1 / 32**2, case.deq_dtype)
        options["quant_scale1"] = torch.tensor([127.0])
        options["deq_scale2"] = deq_scale(1 / (32 * 127), case.deq_dtype)
    if case.output == "int8":
        n, d = case.heads[0], case.d
        shape = {"tensor": (1,), "channel": (1, n, d)}[case.scale2]
        scale_dtype = dtype if case.scale2_as_query and dtype.itemsize == 2 else torch.float32

        def draw(low: float, high: float) -> Tensor:
            values = torch.rand(shape, generator=random.generator) * (high - low) + low
            return values.to(scale_dtype)

        options["quant_scale2"] = draw(20, 60)
        if case.offset:
            options["quant_offset2"] = draw(-9, 9)
    return options


def build(case: PromptCase, dtype: torch.dtype) -> Sample:
    random = Random(case.id, dtype)
    inputs = {
        name: random.normal(*case.shape(side))
        for name, side in (("query", 0), ("key", 1), ("value", 1))
    }
    if case.inputs == "int8":
        inputs = {
            name: (x.float() * 32).round().clamp(-128, 127).to(torch.int8)
            for name, x in inputs.items()
        }
    options: dict[str, Any] = {
        "num_heads": case.heads[0],
        "scale_value": case.d**-0.5,
        "pre_tokens": case.pre,
        "next_tokens": case.next,
        "layout": case.layout,
        "num_key_value_heads": case.heads[1] if case.heads[0] != case.heads[1] else 0,
        "sparse_mode": case.mode,
    }
    if case.mask:
        options["atten_mask"] = full_mask(case, random)
    elif case.mode >= 2:
        leading = {0: (2048, 2048), 1: (1, 2048, 2048), 2: (1, 1, 2048, 2048)}[case.mode - 2]
        options["atten_mask"] = compressed_mask(case.mode, case.mask_dtype).view(leading)
    for name, lengths in zip(("query", "key"), case.lengths, strict=True):
        if lengths is not None:
            options[f"actual_seq_lengths_{name}"] = as_lengths(lengths)
    options.update(quantization(case, dtype, random))
    return Sample("prompt_flash_attention", f"{case.id}-{dtype}", inputs, options)


# One call in each layout and one of each form.
DEVICE_CASES = [case for case in CASES if case.b > 0 and all(case.s) and max(case.s) < 300][::2]

PROMPT_FLASH_ATTENTION = Operator(
    "prompt_flash_attention",
    CASES,
    build,
    inference_only=True,
    on_device=DEVICE_CASES.__contains__,
    torch_npu=partial(torch_npu, "npu_prompt_flash_attention"),
)

OPERATORS = [PROMPT_FLASH_ATTENTION]
