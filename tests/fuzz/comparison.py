"""A call that worked, against the reference, its gradients, and fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from ascend_attn_ops import reference
from ascend_attn_ops._core.arguments import is_number
from ascend_attn_ops._core.sparse_modes import COMPRESSED_MODES, compressed_mask
from ascend_attn_ops.reference.operators.kv_quant_sparse_flash_attention import numbers_of
from support.samples import Operator, Sample, bytes_of
from torch import Tensor

from .calls import check
from .case import Finding
from .copies import has_memory, tensors_in
from .outcome import Outcome, is_out_of_memory, run, same_bits

# Larger numbers overflow, or lose more digits than a tolerance allows.
_LARGEST = 1e3
_MOST_ELEMENTS = 20_000
_LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")
_CONVERSIONS: dict[str, Callable[[Any], object]] = {"int": int, "float": float, "bool": bool}


def has_nan(x: Tensor) -> bool:
    return x.is_floating_point() and has_memory(x) and bool(x.isnan().any())


def _moderate(operator: Operator, arguments: dict[str, Any]) -> bool:
    """Factors and offsets; scale_value for int8 alone, whose products are float16."""
    int8 = getattr(arguments.get("query"), "dtype", None) == torch.int8
    for x in operator.overload._schema.arguments:
        value = arguments.get(x.name, x.default_value)
        factor = str(x.type) == "float" or (int8 and x.name == "scale_value" and value is not None)
        if factor and not (is_number(value) and abs(float(value)) <= _LARGEST):
            return False
    return True


def _in_bytes(arguments: dict[str, Any]) -> list[Tensor]:
    """The ropes and scales of a latent cache in int8, which views of its bytes may change."""
    if "rope_head_dim" not in arguments:
        return []
    query, key, rope = arguments["query"], arguments["key"], int(arguments["rope_head_dim"])
    size = query.shape[-1] - rope
    ends = size, size + rope * query.itemsize
    ropes, scales = key.detach().tensor_split(ends, -1)[1:]
    return [numbers_of(ropes, query.dtype), numbers_of(scales, torch.float32)]


def _plain(arguments: dict[str, Any]) -> bool:
    """Whether the reference can compute it: real tensors, few elements, finite numbers."""
    tensors = list(tensors_in(arguments))
    if not all(map(has_memory, tensors)):
        return False
    for x in (*tensors, *_in_bytes(arguments)):
        if x.numel() > _MOST_ELEMENTS and x.dtype not in (torch.bool, torch.uint8):
            return False
        if x.dtype == torch.uint64:
            # A scale: the bits of a float32 are the low half.
            x = x.to(torch.int32).view(torch.float32)
        if x.is_floating_point() and x.numel():
            largest = float(x.detach().float().abs().max())
            if not largest <= _LARGEST:
                return False
    return True


def _for_reference(operator: Operator, arguments: dict[str, Any]) -> Sample | None:
    """Numbers and lists in the types of the schema; None where they cannot be told."""
    given: dict[str, Any] = {}
    if not _moderate(operator, arguments):
        return None
    for x in operator.overload._schema.arguments:
        if x.name not in arguments and not x.has_default_value():
            continue
        value, kind = arguments.get(x.name, x.default_value), str(x.type)
        if isinstance(value, Tensor):
            value = value.detach().resolve_neg().as_subclass(Tensor)
            # torch's zeros without memory.
            value = value.clone() if value._is_zerotensor() else value
        try:
            if kind in _CONVERSIONS:
                if value is None:
                    # The public function chooses.
                    return None
                value = _CONVERSIONS[kind](value)
            elif x.name in _LENGTHS and value is not None:
                value = [int(n) for n in value]
                if "Tensor" in kind:
                    value = torch.tensor(value, dtype=torch.int32)
            elif "List[int]" in kind and not isinstance(value, (list, type(None))):
                # torch.ops repeats a single number, and takes a dict as the list of its keys.
                return None
            elif "List[int]" in kind and value is not None:
                # It takes the numbers of numpy, too.
                value = [int(n) for n in value]
            elif kind == "str" and type(value) is not str:
                return None
            elif kind == "List[Tensor]":
                value = [y.detach().resolve_neg() for y in value]
        except (TypeError, ValueError, RuntimeError):
            return None
        given[x.name] = value
    padded = given.get("layout") != "TND" and any(given.get(x) is not None for x in _LENGTHS)
    if "pse_shift" in given and padded:
        # Lengths of padded batches, which the public function packs: see valid/padded.
        return None
    mode = given.get("sparse_mode", 0)
    if "atten_mask" in given and given["atten_mask"] is None and mode in COMPRESSED_MODES:
        # The public function builds it.
        given["atten_mask"] = compressed_mask(mode, torch.device("cpu"))
    inputs = {x.name for x in operator.overload._schema.arguments if not x.kwarg_only}
    return Sample(
        operator.name, "changed", {name: x for name, x in given.items() if name in inputs},
        {name: x for name, x in given.items() if name not in inputs},
    )  # fmt: skip


def check_against_reference(
    operator: Operator, arguments: dict[str, Any], outcome: Outcome, written: dict[str, Any] | None
) -> bool:
    """`written`: the arguments after a call in place. Returns whether the reference was asked."""
    if written is None and not _plain(arguments):
        return False
    sample = _for_reference(operator, arguments)
    if sample is None:
        return False
    # Without values there is nothing to compare the selection by.
    if sample.arguments.get("return_values") is False:
        return False
    half = (x for x in outcome.outputs if x.dtype == torch.float16)
    if "_grad" in operator.name and any(bool(x.isinf().any()) for x in half):
        # A changed number, such as a scale, can make gradients overflow in float16.
        return False
    if written is not None:
        sample.call(reference)
        for name in ("key_cache", "value_cache"):
            x, expected = written.get(name), sample.arguments.get(name)
            if isinstance(x, Tensor) and isinstance(expected, Tensor):
                bits = (bytes_of(y) for y in (x, expected))
                # A mean, as runs of rows may have one, of NaN may be another NaN.
                mean = sample.arguments.get("compress_lens") is not None and x.is_floating_point()
                if not (same_bits(*bits) or (mean and same_bits(x.float(), expected.float()))):
                    raise Finding(f"{name} is not what the reference writes")
        return True
    try:
        check(sample, outcome.outputs)
    except AssertionError as error:
        text = " ".join(str(error).split())
        if "softmax_sum" in sample.arguments and ("nan" in text or "inf" in text):
            # Statistics of other scores make weights that are infinite.
            return False
        raise Finding(f"not as the reference: {text}") from None
    except Exception as error:
        if is_out_of_memory(Outcome(error=error)):
            # For what nothing is asked.
            return False
        kind = type(error).__name__
        raise Finding(f"worked, where the reference raises {kind}: {error}") from None
    return True


def check_results(operator: Operator, arguments: dict[str, Any], outcome: Outcome) -> None:
    # Statistics of other scores make infinite weights.
    if "softmax_sum" in arguments:
        return
    if not _plain(arguments) or not _moderate(operator, arguments):
        return
    for name, x in zip(operator.output_names, outcome.outputs, strict=True):
        if has_nan(x):
            raise Finding(f"{name} has NaN where all arguments are finite")


def check_gradients(outcome: Outcome, arguments: dict[str, Any]) -> None:
    """Checks that the backward runs for every valid forward, or says that there is none."""
    outputs = [x for x in outcome.outputs if x.requires_grad]
    inputs = [x for x in tensors_in(arguments) if x.requires_grad]
    if not inputs:
        # A long list hides its tensors.
        return
    gradients = run(
        torch.autograd.grad, (outputs, inputs, [torch.ones_like(x) for x in outputs]),
        {"allow_unused": True},
    )  # fmt: skip
    if gradients.error is not None:
        if not gradients.of_library:
            kind = type(gradients.error).__name__
            raise Finding(f"the backward raised {kind}: {gradients.text[:500]!r}")
        return
    for x, gradient in zip(inputs, gradients.outputs, strict=True):
        if isinstance(gradient, Tensor) and gradient.shape != x.shape:
            raise Finding(f"a gradient of shape {gradient.shape} for {x.shape}")


def _on_meta(x: Any, kind: str) -> Any:
    """Moves tensors to the device "meta", except tensors in the place of a number."""
    if "Tensor" not in kind:
        return x
    if isinstance(x, Tensor):
        y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return y.requires_grad_(x.requires_grad)
    return [_on_meta(item, kind) for item in x] if isinstance(x, (list, tuple)) else x


def check_on_meta(operator: Operator, outcome: Outcome, arguments: dict[str, Any]) -> None:
    """One function checks the calls of all devices; only values and memory are not seen there."""
    tensors = list(tensors_in(arguments))
    if not tensors or not all(map(has_memory, tensors)) or any(x.is_inference() for x in tensors):
        return
    kinds = {x.name: str(x.type) for x in operator.overload._schema.arguments}
    on_meta = {name: _on_meta(x, kinds[name]) for name, x in arguments.items()}
    meta = run(getattr(torch.ops.ascend, operator.name), (), on_meta)
    others = [x for n, x in arguments.items() if kinds[n] != "str" and not isinstance(x, Tensor)]
    if any(isinstance(x, Iterable) for x in others) and "failed to match any schema" in meta.text:
        return  # lists of tensors or numpy's numbers, and lists beside tensors of lengths
    if outcome.error is None:
        if meta.error is not None:
            raise Finding(f"worked, and is refused on the device meta: {meta.text[:500]}")
        for x, y in zip(outcome.outputs, meta.outputs, strict=True):
            on_cpu, there = ((t.dtype, list(t.shape), t.stride()) for t in (x, y))
            if on_cpu != there:
                raise Finding(f"an output is {on_cpu}, and on the device meta {there}")
    elif outcome.of_library and isinstance(outcome.error, TypeError) and meta.text != outcome.text:
        raise Finding(f"on the device meta {meta.text!r}, on the CPU {outcome.text!r}")
