"""Calls for which CANN's own host code, compiled elsewhere, has given its verdict.

Each probe ends after the first phase, in which that code runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from ascend_attn_ops._core.device_limits import limits

from ascend_attn_check.limits import refusal_of_device
from ascend_attn_check.probe import PASS, Context, Outcome, Probe, Skip, skipping
from ascend_attn_check.samples import OPERATORS
from ascend_attn_check.samples.attention_update import UpdateCase
from ascend_attn_check.samples.flash_attention_score import FlashCase

SECTION = "host code"
HALF = torch.bfloat16
ATLAS = ("A2", "A3")


@dataclass(frozen=True)
class Call:
    """A call that this library makes, and whether CANN accepts it."""

    id: str
    operator: str
    case: Any
    products: tuple[str, ...]
    # The releases of CANN that accept it.
    accepted: tuple[str, ...] = ("8.5", "9.0", "9.1")


WIDE = FlashCase(b=4, s=(1, 1), heads=(64, 64), d=(192, 128))
CALLS = [
    *(
        Call(f"wide-keys-{layout}-{heads}-heads", "flash_attention_score_grad", case, ATLAS)
        for layout, heads, case in (
            ("SBH", 255, replace(WIDE, layout="SBH", b=3, heads=(85, 85))),
            ("SBH", 256, replace(WIDE, layout="SBH")),
            ("BSH", 255, replace(WIDE, layout="BSH", b=1, heads=(255, 255))),
            ("BSH", 256, replace(WIDE, layout="BSH", b=1, heads=(256, 256))),
            ("BSND", 256, replace(WIDE, layout="BSND", b=1, heads=(256, 256))),
            ("BNSD", 256, replace(WIDE, b=1, heads=(256, 256))),
        )
    ),
    *(
        Call(f"{parts}-parts", "attention_update", UpdateCase(parts=parts), ATLAS, releases)
        for parts, releases in (
            (16, ("8.5", "9.0", "9.1")), (17, ("9.1",)), (128, ("9.1",))
        )
    ),
    Call("D-12", "attention_update", UpdateCase(d=12), ATLAS, ()),
    *(
        Call(f"D-{d}", "flash_attention_score", FlashCase(d=(d, d)), (*ATLAS, "950"))
        for d in (12, 17, 200, 576)
    ),
    Call("values-narrower", "flash_attention_score", FlashCase(d=(192, 128)), (*ATLAS, "950")),
    Call("wide-SBH", "flash_attention_score",
         FlashCase(layout="SBH", b=8, s=(1, 1), heads=(64, 64), d=(160, 160)), (*ATLAS, "950")),
    Call("16-bit-prompt", "prompt_flash_attention", None, (*ATLAS, "310P")),
]  # fmt: skip


def probes(context: Context) -> Iterator[Probe]:
    device = context.product
    if device is None:
        yield skipping(SECTION, "all calls", "the host code is that of an NPU, and this is the CPU")
        return
    for call in CALLS:
        if device.product in call.products:
            name = f"{call.operator}-{call.id}"
            yield Probe(SECTION, call.operator, name, partial(_run, call), quick=True)


def _run(call: Call, context: Context) -> Outcome:
    operator = OPERATORS[call.operator]
    case = call.case or operator.cases[0]
    with limits(None):
        sample = operator.make(case, HALF if call.case else torch.float16)
        try:
            refused = refusal_of_device(call.operator, sample.arguments, context)
        except NotImplementedError as error:
            raise Skip(str(error)) from None
    assert context.product is not None
    if refused is None:
        if context.product.cann in call.accepted:
            return PASS
        return Outcome("note", "CANN accepts it, where its code was found to refuse")
    if context.product.cann in call.accepted:
        return Outcome("differs", f"refused by CANN: {refused}")
    return Outcome("pass", refused)
