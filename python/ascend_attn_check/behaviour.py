"""How calls behave together: streams, devices, graphs, determinism, memory, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from ascend_attn_ops.reference.call import Sample, bytes_of
from torch import Tensor

from ascend_attn_check.numbers import compare
from ascend_attn_check.probe import PASS, Context, Outcome, Probe, Skip
from ascend_attn_check.samples import OPERATORS, Recipe
from ascend_attn_check.samples.flash_attention_score import FlashCase
from ascend_attn_check.samples.fused_infer_attention_score import InferCase
from ascend_attn_check.samples.prompt_flash_attention import PromptCase

SECTION = "behaviour"
CALLS = 1000
LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")  # lists, a part of the launch
GROWTH = 2**20  # bytes that the allocator may keep more after so many calls


def probes(context: Context) -> Iterator[Probe]:
    firsts = [
        next(recipe for recipe in operator.recipes if recipe.on_device)
        for operator in OPERATORS.values()
        if not operator.in_place
    ]
    for name, run in EACH.items():
        for recipe in firsts:
            probe_name = f"{name}-{recipe.operator.name}"
            yield Probe(SECTION, name, probe_name, partial(run, recipe), quick=name != "memory")
    for name, probe in ONCE.items():
        yield Probe(SECTION, name, name, probe, quick=True)


def _half(context: Context) -> torch.dtype:
    """Returns bfloat16, or float16 on Ascend 310P, which has no bfloat16."""
    on_310p = context.product is not None and context.product[0] == "310P"
    return torch.float16 if on_310p else torch.bfloat16


def _placed(recipe: Recipe, context: Context) -> Sample:
    sample = recipe.make(_half(context))
    if refused := context.refusal(sample):
        raise Skip(refused)
    return sample.copied_to(context.device)


def _on_cpu(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.cpu() for x in outputs)


def _is_right(recipe: Recipe, outputs: tuple[Tensor, ...], context: Context) -> Outcome:
    return compare(recipe.make(_half(context)), outputs)


def _same_bits(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> int:
    """Return how many elements differ."""
    pairs = zip(_on_cpu(first), _on_cpu(second), strict=True)
    return sum(int((bytes_of(x) != bytes_of(y)).sum()) for x, y in pairs)


def deterministic(recipe: Recipe, context: Context) -> Outcome:
    """Three equal calls, with torch.use_deterministic_algorithms."""
    sample = _placed(recipe, context)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        results = [sample.call(torch.ops.ascend) for _ in range(3)]
    except ValueError as error:
        return Outcome("refused", str(error))  # CANN 8.5 promises none
    finally:
        torch.use_deterministic_algorithms(before)
    differing = sum(_same_bits(results[0], x) for x in results[1:])
    assert not differing, f"{differing} bytes differ between equal calls"
    return PASS


def second_call(recipe: Recipe, context: Context) -> Outcome:
    """A call after another one, whose outputs it must leave alone."""
    sample = _placed(recipe, context)
    first = sample.call(torch.ops.ascend)
    before = tuple(x.clone() for x in first)
    outcome = _is_right(recipe, sample.call(torch.ops.ascend), context)
    assert not _same_bits(first, before), "the second call changes the results of the first"
    return outcome


def strided(recipe: Recipe, context: Context) -> Outcome:
    """Every tensor a slice of a larger one, and with its axes in another order in memory."""
    sample = _placed(recipe, context)
    outcome = PASS
    for variant in (sample.strided(), sample.transposed()):
        outcome = _is_right(recipe, variant.call(torch.ops.ascend), context)
    return outcome


def memory(recipe: Recipe, context: Context) -> Outcome:
    """Compare what the allocator has before and after many calls."""
    if not context.on_npu:
        raise Skip("torch does not count the CPU's memory")
    sample = _placed(recipe, context)
    npu = torch.get_device_module("npu")
    for _ in range(10):
        sample.call(torch.ops.ascend)
    context.synchronize()
    before = npu.memory_reserved()
    for _ in range(CALLS):
        sample.call(torch.ops.ascend)
    context.synchronize()
    grown = npu.memory_reserved() - before
    assert grown <= GROWTH, f"{CALLS} calls have taken {grown} bytes"
    return Outcome("pass", f"{grown} bytes more after {CALLS} calls")


def stream(recipe: Recipe, context: Context) -> Outcome:
    """On a stream beside the default one, which waits for it."""
    npu = _npu(context)
    sample = _placed(recipe, context)
    side = npu.Stream()
    side.wait_stream(npu.current_stream())
    with npu.stream(side):
        outputs = sample.call(torch.ops.ascend)
    npu.current_stream().wait_stream(side)
    return _is_right(recipe, outputs, context)


def graph(recipe: Recipe, context: Context) -> Outcome:
    """A captured call, replayed with other values in its tensors."""
    other = replace(recipe, case=recipe.case).make(_half(context)).scaled(0.5)
    return _replayed(_placed(recipe, context), other, context)


def _replayed(sample: Sample, other: Sample, context: Context, **options: Any) -> Outcome:
    """Captures a call, and compares a replay with the values and the lengths of another one."""
    npu = _npu(context)
    if not hasattr(npu, "NPUGraph"):
        raise Skip("this torch_npu captures no graphs")
    captured = npu.NPUGraph()
    try:
        with npu.graph(captured, **options):
            outputs = sample.call(torch.ops.ascend)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        if "captur" in str(error):
            return Outcome("refused", str(error))  # the host reads lengths
        if "Failed to find function" in str(error):
            raise Skip(f"this CANN captures no such graph: {error}") from error
        raise
    for name, x in other.copied_to(context.device).tensors.items():
        sample.tensors[name].copy_(x)
    if options:
        lengths = {name: x for name, x in other.options.items() if name in LENGTHS}
        context.synchronize()
        captured.update(cpu_update_input=[lengths])
    captured.replay()
    context.synchronize()
    return compare(other, outputs)


def _npu(context: Context) -> Any:
    if not context.on_npu:
        raise Skip("this is the CPU")
    return torch.get_device_module("npu")


EACH: dict[str, Callable[[Recipe, Context], Outcome]] = {
    "determinism": deterministic,
    "second-call": second_call,
    "strides": strided,
    "memory": memory,
    "stream": stream,
    "graph": graph,
}


def _dense(case: FlashCase, context: Context) -> Sample:
    sample = OPERATORS["flash_attention_score"].make(case, _half(context))
    if refused := context.refusal(sample):
        raise Skip(refused)
    return sample


def two_devices(context: Context) -> Outcome:
    """A call on the second device, while the first is the current one."""
    npu = _npu(context)
    if npu.device_count() < 2:
        raise Skip("there is one device")
    sample = _dense(FlashCase(), context)
    second = (torch.device(context.device).index or 0) ^ 1
    outputs = sample.copied_to(f"npu:{second}").call(torch.ops.ascend)
    npu.synchronize(second)
    assert all(x.device.index == second for x in outputs), "outputs on another device"
    return compare(sample, outputs)


def after_an_error(context: Context) -> Outcome:
    """A good call after one with wrong arguments."""
    sample = _dense(FlashCase(), context)
    placed = sample.copied_to(context.device)
    try:
        placed.replace(num_heads=3).call(torch.ops.ascend)
    except ValueError:
        return compare(sample, placed.call(torch.ops.ascend))
    return Outcome("differs", "a wrong number of heads is accepted")


def many_sequences(context: Context) -> Outcome:
    """A pack of 1,000 sequences, some of them empty."""
    lengths = tuple(i % 4 for i in range(1000))
    case = FlashCase(layout="TND", lengths=(lengths, lengths), heads=(1, 1), d=(16, 16), mode=3)
    sample = _dense(case, context)
    outputs = sample.copied_to(context.device).call(torch.ops.ascend)
    return compare(sample, outputs)


def other_lengths(context: Context) -> Outcome:
    """The same tensors as packs of different lengths, and as the first pack once more."""
    outcome = PASS
    first = ((3, 6, 4), (5, 9, 4))
    for lengths in (first, ((6, 3, 4), (9, 5, 4)), ((13,), (18,)), first):
        case = FlashCase(layout="TND", lengths=lengths, mode=3)
        sample = _dense(case, context)
        outputs = sample.copied_to(context.device).call(torch.ops.ascend)
        outcome = compare(sample, outputs)
    return outcome


def graph_lengths(name: str, cases: Sequence[Any], context: Context) -> Outcome:
    """A captured call with lists of lengths, which the graph replaces before the replay."""
    if not hasattr(_npu(context), "register_npu_graph_handler"):
        raise Skip("this torch_npu updates no lengths in a graph")
    first, other = (OPERATORS[name].make(case, _half(context)) for case in cases)
    if refused := context.refusal(first) or context.refusal(other):
        raise Skip(refused)
    first = first.copied_to(context.device)
    return _replayed(first, other, context, auto_dispatch_capture=True)


# The first lengths are the longest: an update may not need more workspace than the capture.
CASES_OF_LENGTHS: dict[str, Sequence[Any]] = {
    "flash_attention_score": tuple(
        FlashCase(layout="TND", lengths=lengths, mode=3)
        for lengths in (((3, 6, 4), (5, 9, 4)), ((6, 3, 4), (9, 5, 4)))
    ),
    "prompt_flash_attention": tuple(
        PromptCase(layout="BSND", s=(16, 32), d=16, lengths=(None, lengths))
        for lengths in ((32, 32), (9, 20))
    ),
    "fused_infer_attention_score": tuple(
        InferCase(layout="BSND", s=(16, 32), lengths=(None, lengths), lse=True)
        for lengths in ((32, 32), (9, 20))
    ),
}

ONCE: dict[str, Callable[[Context], Outcome]] = {
    "two devices": two_devices,
    "a call after an error": after_an_error,
    "1000 sequences": many_sequences,
    "other lengths": other_lengths,
    **{
        f"graph-lengths-{name}": partial(graph_lengths, name, cases)
        for name, cases in CASES_OF_LENGTHS.items()
    },
}
