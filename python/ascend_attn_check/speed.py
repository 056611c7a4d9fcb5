"""How long a call takes, on the device and on the host, beside torch_npu's own call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from ascend_attn_ops.reference.call import Sample
from torch.utils.flop_counter import FlopCounterMode

from ascend_attn_check.probe import Context, Outcome, Probe, Skip
from ascend_attn_check.samples import OPERATORS
from ascend_attn_check.samples.flash_attention_score import FlashCase
from ascend_attn_check.samples.sparse import SparseCase

SECTION = "speed"
HALF = torch.bfloat16
SECONDS = 0.5  # of calls that are timed
LARGE_PRODUCT = 1e-3  # seconds
LONGEST_PRODUCT = 5.0  # seconds; calls of torch_npu on a slow host would take minutes


@dataclass(frozen=True)
class Shape:
    operator: str
    name: str
    case: Any
    small: bool  # for the CPU and for --quick


SHAPES = [
    Shape("flash_attention_score", "1x256", FlashCase(
        layout="BSND", b=1, s=(256, 256), heads=(4, 4), d=(128, 128), mode=3), True),
    Shape("flash_attention_score", "1x4096", FlashCase(
        layout="BSND", b=1, s=(4096, 4096), heads=(16, 16), d=(128, 128), mode=3), False),
    Shape("flash_attention_score", "decode-8x4096", FlashCase(
        layout="BSND", b=8, s=(1, 4096), heads=(32, 8), d=(128, 128)), False),
    Shape("lightning_indexer", "1x64x2048", SparseCase(
        b=1, s=(64, 2048), heads=64, d=128, k=1024), True),
    Shape("sparse_flash_attention", "1x16x2048", SparseCase(
        b=1, s=(16, 2048), heads=16, d=512, rope=64, k=1024, absorbed=True), True),
    Shape("sparse_flash_attention", "1x512x8192", SparseCase(
        b=1, s=(512, 8192), heads=64, d=512, rope=64, k=2048, absorbed=True), False),
]  # fmt: skip


def probes(context: Context) -> Iterator[Probe]:
    for shape in SHAPES:
        if shape.small or context.on_npu:
            name = f"{shape.operator}-{shape.name}"
            yield Probe(SECTION, name, name, partial(_run, shape), shape.small)


def _run(shape: Shape, context: Context) -> Outcome:
    operator = OPERATORS[shape.operator]
    sample = operator.make(shape.case, HALF)
    size = sum(x.nbytes for x in sample.tensors.values())
    if 4 * size > context.memory:
        raise Skip(f"needs {4 * size / 10**9:.1f} GB")
    if refused := context.refusal(sample):
        return Outcome("refused", refused)
    flops, peak = _flops(sample), _matmul_rate(context)
    if flops > LONGEST_PRODUCT * 1e12 * peak:
        raise Skip(f"its products alone take {flops / (1e12 * peak):.0f} s here")
    placed = sample.copied_to(context.device)
    whole, host = _times(lambda: placed.call(torch.ops.ascend), context)
    figures = {"seconds": whole, "host seconds": host}
    rate = flops / whole / 1e12
    text = f"{1e3 * whole:.3f} ms, {rate:.3g} TFLOP/s, host {1e6 * host:.0f} us"
    text += f", {rate / peak:.0%} of a matrix product's here"
    if context.on_npu and operator.torch_npu is not None:
        defaults = {x.name: x.default_value for x in operator.overload._schema.arguments}
        arguments = {**defaults, **placed.arguments}
        call = operator.torch_npu
        try:
            their_whole, their_host = _times(lambda: call(arguments), context)
        except (AttributeError, RuntimeError) as error:
            text += f"; torch_npu's own call fails: {str(error).splitlines()[0]}"
        else:
            figures |= {"torch_npu seconds": their_whole, "torch_npu host seconds": their_host}
            text += f"; torch_npu's own {1e3 * their_whole:.3f} ms, host {1e6 * their_host:.0f} us"
    return Outcome("pass", text, {name: float(f"{x:.4g}") for name, x in figures.items()})


@cache
def _matmul_rate(context: Context) -> float:
    """Return the TFLOP/s of a large product of bfloat16: what the device can do at most.

    A product is large enough when it takes far longer than its launch. The simulated device and the
    CPU would take minutes for those of an NPU.
    """
    size, seconds = 128, 0.0
    while seconds < LARGE_PRODUCT and size < 4096:
        size *= 2
        x = torch.ones(size, size, dtype=HALF, device=context.device)
        seconds, _ = _times(partial(torch.matmul, x, x), context)
    return 2 * size**3 / seconds / 1e12


def _times(call: Callable[[], Any], context: Context) -> tuple[float, float]:
    """Return the seconds of a call, and those after which it returns to its caller."""
    # The second call builds and loads nothing. A device takes calls faster than it runs them, so
    # the time of one decides how many follow.
    for _ in range(2):
        started = time.perf_counter()
        call()
        context.synchronize()
        one = time.perf_counter() - started
    calls, host = max(3, min(200, int(SECONDS / one))), 0.0
    started = time.perf_counter()
    for _ in range(calls):
        before = time.perf_counter()
        call()
        host += time.perf_counter() - before
    context.synchronize()
    return (time.perf_counter() - started) / calls, host / calls


def _flops(sample: Sample) -> int:
    with FlopCounterMode(display=False) as counter:
        sample.map(lambda x: x.to("meta")).call(torch.ops.ascend)
    return int(counter.get_total_flops())
