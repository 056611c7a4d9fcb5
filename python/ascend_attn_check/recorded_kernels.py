"""Calls that CANN's own kernels have computed off the device, repeated here.

Each line compares the device with the recorded results and with the CPU operator. The two columns
say where a difference comes from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial

from ascend_attn_ops._core.device_limits import limits
from torch import Tensor

from ascend_attn_check import kernel_calls
from ascend_attn_check.kernel_calls import Distance, KernelCall
from ascend_attn_check.probe import Context, Outcome, Probe, Skip, skipping

SECTION = "recorded kernels"

# Says where a difference comes from, by whether the device equals the recording and the CPU.
FINDINGS = {
    (False, True): "the recording alone differs: a finding about the recording or the device",
    (True, False): "the CPU operator alone differs: a finding about the CPU operator",
    (False, False): "it differs from both: a finding about the device",
}


def probes(context: Context) -> Iterator[Probe]:
    if context.recorded is None:
        yield skipping(
            SECTION, "all calls", "no recorded calls are at hand: --recorded names their folder"
        )
        return
    for path in kernel_calls.files_in(context.recorded):
        try:
            calls = kernel_calls.read(path)
        except ValueError as error:
            run = partial(_unreadable, str(error))
            yield Probe(SECTION, path.name, path.name, run, quick=True)
            continue
        for call in calls:
            yield Probe(SECTION, call.id, call.id, partial(_run, call), quick=True)


def _unreadable(text: str, context: Context) -> Outcome:
    return Outcome("differs", text)


def _run(call: KernelCall, context: Context) -> Outcome:
    if context.product is not None and context.product.product not in kernel_calls.PRODUCTS:
        products = " and ".join(kernel_calls.PRODUCTS)
        raise Skip(f"the recorded kernels are those of {products}")
    if refused := context.refusal(call.sample):
        return Outcome("refused", refused)
    with limits(None):
        on_cpu = call.run("cpu")
    if not context.on_npu:
        return verdict({"recording": call.distances(on_cpu, call.outputs)})
    actual = call.run(context.device)
    return verdict(compared(call, actual, on_cpu))


def compared(
    call: KernelCall, actual: Mapping[str, Tensor], on_cpu: Mapping[str, Tensor]
) -> dict[str, list[Distance]]:
    """The two columns of a line."""
    return {
        "recording": call.distances(actual, call.outputs),
        "CPU": call.distances(actual, on_cpu),
    }


def verdict(columns: Mapping[str, list[Distance]]) -> Outcome:
    """The largest difference of each column, as a share of the allowed one."""
    shares = {name: largest_share(distances) for name, distances in columns.items()}
    parts = (f"from the {name} {share:.2f}" for name, share in shares.items())
    text = f"difference {', '.join(parts)}, where 1 is allowed"
    figures = {name: round(x, 4) for name, x in shares.items() if math.isfinite(x)}
    equal = {name: all(x.allowed for x in distances) for name, distances in columns.items()}
    if all(equal.values()):
        return Outcome("pass", text, figures)
    finding = FINDINGS[equal["recording"], equal.get("CPU", True)]
    lines = [f"{finding}; {text}"]
    for name, distances in columns.items():
        lines += [
            f"{x.output}: from the {name} {x.difference:.2g} of the maximum, "
            f"{x.share:.2f} of the allowed difference"
            for x in distances if not x.allowed
        ]  # fmt: skip
    return Outcome("differs", "\n".join(lines), figures)


def largest_share(distances: list[Distance]) -> float:
    """NaN, from a NaN in one of the results, is the largest."""
    shares = [x.share for x in distances]
    return math.nan if any(map(math.isnan, shares)) else max(shares, default=0.0)
