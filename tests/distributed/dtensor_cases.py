"""Computes every sample in one process and with DTensors, on the ranks of test_dtensor*.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import ascend_attn_ops
import pytest
import torch
from ascend_attn_ops.distributed import dtensor, enable_dtensor
from ascend_attn_ops.distributed.dtensor import HeadsOfSequences, axes_of, key_heads_of
from support.samples import OPERATORS, Recipe, Sample
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

# For float64 results, relative to the largest element.
LARGEST_ERROR = 1e-12

Place = Callable[[str, Tensor], Sequence[Placement]]


def without_group(group: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that makes device meshes of its own."""
    return function(*args)


@functools.cache
def mesh_of(name: str) -> DeviceMesh:
    """Returns a mesh on four ranks: "4", "2x2" or "2" (two meshes of two)."""
    if name == "4":
        return init_device_mesh("cpu", (4,))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    return both if name == "2x2" else both["inner"]


def distribute(x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Without communication: every rank has the whole tensor."""
    whole = [Replicate() if p.is_partial() else p for p in placements]
    local = torch.distributed.tensor.distribute_tensor(
        x.detach(), mesh, whole, src_data_rank=None
    ).to_local()
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            # Half of it on two ranks each, which sums exactly, and nothing on the others.
            coordinate = mesh.get_local_rank(dim)
            local = 0.5 * local if coordinate < 2 else torch.zeros_like(local)
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    if not expected.dtype.is_floating_point:
        return 0.0 if torch.equal(actual, expected) else float("inf")
    finite = expected.isfinite()
    if not torch.equal(actual.isfinite(), finite) or finite.numel() == 0:
        return float("inf") if finite.numel() else 0.0
    largest = expected.where(finite, torch.zeros(())).abs().max().clamp(min=1.0)
    difference = (actual - expected).abs()
    if expected.dtype == torch.bfloat16:
        # For an int8 query: sums of float32, in another order on each rank, and then rounded.
        difference -= torch.finfo(torch.bfloat16).eps * expected.abs() + 2.0**-20 * largest
    difference = difference.where(finite, torch.zeros(())).max().clamp(min=0.0)
    return float(difference / largest)


def letters_of(sample: Sample) -> tuple[dict[str, str], dict[str, Any]]:
    """The axes of a sample's tensors, and all its arguments."""
    defaults = {
        x.name: x.default_value if x.has_default_value() else None
        for x in OPERATORS[sample.operator].overload._schema.arguments
    }
    call = {**defaults, **sample.arguments}
    letters, *_ = axes_of(sample.operator, call)
    return {name: letters.get(name.partition("[")[0], "") for name in sample.tensors}, call


def by_axis(axes: Sequence[str], sample: Sample) -> Place:
    """Every tensor sharded by the axis of each mesh dimension, or replicated without it."""
    letters, call = letters_of(sample)
    key_heads = key_heads_of(call)

    def placement(here: str, axis: str) -> Placement:
        if axis == "N" and "N" not in here and key_heads > 1:
            axis = "K"
        return Shard(here.index(axis)) if axis in here else Replicate()

    return lambda name, x: [placement(letters.get(name, ""), axis) for axis in axes]


def ranks_of(axes: Sequence[str], sample: Sample, sizes: Sequence[int]) -> dict[str, int]:
    """Among how many ranks every axis is divided; "-" stands for none."""
    ranks: dict[str, int] = {}
    for axis, size in zip(axes, sizes, strict=True):
        divided = dtensor.LINES[sample.operator].of_heads if axis == "N" else axis
        ranks[divided] = ranks.get(divided, 1) * size
    return {axis: number for axis, number in ranks.items() if axis != "-"}


def sample_of(recipe: Recipe, axes: Sequence[str], sizes: Sequence[int]) -> Sample:
    """Without so many first queries that the others have equal parts: what they see stays."""
    sample = recipe.make(torch.float64)
    ranks = ranks_of(axes, sample, sizes).get("S", 1)
    dims = {name: x.index("S") for name, x in letters_of(sample)[0].items() if "S" in x}
    if not dims:
        return sample
    queries = next(sample.tensors[name].shape[dim] for name, dim in dims.items())
    first = queries % ranks if queries > ranks else 0
    if not first:
        return sample
    changes = {x: sample.tensors[x].narrow(d, first, queries - first) for x, d in dims.items()}
    if (lengths := sample.tensors.get("actual_seq_lengths_query")) is not None:
        changes["actual_seq_lengths_query"] = (lengths - first).clamp(min=0)
    return sample.replace(**changes)


def divides(axes: Sequence[str], sample: Sample, sizes: Sequence[int]) -> bool:
    """Whether these axes can be sharded, and every one of them has equal parts."""
    letters, call = letters_of(sample)
    packed = call.get("layout", "").partition("_")[0] in ("TND", "NTD")
    whole = call.get("block_table") is not None or call.get("cmp_ratio", 1) > 1
    flat = call.get("drop_mask") is not None or letters.get("pse_shift") == "z"
    for axis, ranks in ranks_of(axes, sample, sizes).items():
        if axis == "B" and packed:
            continue  # there is nothing to shard
        # Statistics of sequences are those that the forward saved on this rank.
        saved = axis == "N" and letters.get("softmax_max") == dtensor.PER_SEQUENCE
        if flat or saved or (axis == "S" and whole):
            return False
        parts = [x.shape[letters[n].index(axis)] for n, x in sample.tensors.items()
                 if axis in letters[n]]  # fmt: skip
        if axis == "N":
            key_heads = key_heads_of(call)
            parts += [call.get("num_heads") or 0, key_heads if key_heads > 1 else 0]
        if any(x % ranks for x in parts) or (axis == "B" and len(set(parts)) > 1):
            return False
    return True


def as_dtensors(sample: Sample, mesh: DeviceMesh, place: Place) -> Sample:
    placed: dict[int, DTensor] = {}
    for name, x in sample.tensors.items():
        if id(x) not in placed:
            placed[id(x)] = distribute(x, mesh, place(name, x)).requires_grad_(x.requires_grad)
    return sample.map(lambda x: placed[id(x)])


def incoming_of(sample: Sample, outputs: Sequence[Tensor]) -> list[Tensor]:
    record = OPERATORS[sample.operator]
    assert record.gradient is not None
    carrying = record.gradient_outputs(tuple(outputs))
    return [record.gradient.incoming(sample, tuple(outputs), x) for x in carrying]


def errors_of(recipe: Recipe, sample: Sample, mesh: DeviceMesh, place: Place) -> float:
    """The largest error of a sample's outputs and gradients."""
    names: tuple[str, ...] = ()
    if recipe.differentiable:
        names = sample.tensor_names(recipe.operator.differentiable)
        sample = sample.requires_grad(names)
    dtensors = as_dtensors(sample, mesh, place)
    expected: list[Any] = list(sample.call(torch.ops.ascend))
    actual: list[Any] = list(dtensors.call(torch.ops.ascend))
    if names:
        incoming = incoming_of(sample, expected)
        carrying = recipe.operator.gradient_outputs(tuple(actual))
        placed = [distribute(x, mesh, place("", x)) for x in incoming]
        torch.autograd.backward(recipe.operator.gradient_outputs(tuple(expected)), incoming)
        torch.autograd.backward(carrying, placed)
        expected += [sample.tensors[name].grad for name in names]
        actual += [dtensors.tensors[name].grad for name in names]
    largest = 0.0
    for x, y in zip(actual, expected, strict=True):
        assert (x is None) == (y is None)
        if isinstance(x, DTensor) and y is not None:
            largest = max(largest, error_of(x.detach(), y.detach(), sample))
    return largest


def error_of(actual: DTensor, expected: Tensor, sample: Sample) -> float:
    """Returns the error of this rank's part; partial sums are added first."""
    assert actual.shape == expected.shape
    if HeadsOfSequences() in actual.placements:
        return error(whole_statistics(actual, sample), expected)
    if any(placement.is_partial() for placement in actual.placements):
        return error(actual.full_tensor(), expected)
    part = distribute(expected, actual.device_mesh, actual.placements)
    return error(actual.to_local(), part.to_local())


def whole_statistics(x: DTensor, sample: Sample) -> Tensor:
    """Joins statistics that only the backward can read, sequence by sequence."""
    with pytest.raises(RuntimeError, match="not supported"):
        x.full_tensor()
    heads = x.shape[1]
    mesh = x.device_mesh
    dims = [dim for dim, p in enumerate(x.placements) if p == HeadsOfSequences()]
    tokens, lanes = x.shape[0], x.shape[2]
    locals_ = x.to_local().reshape(-1, lanes)
    rows = locals_.shape[0] // max(tokens, 1)
    pieces, begin = [], 0
    for end in [*sample.options["actual_seq_lengths_query"], tokens]:
        end = max(begin, end)  # a list may be closed by a 0
        part = locals_[rows * begin : rows * end].view(rows, end - begin, lanes)
        placements = [Shard(0) if dim in dims else Replicate() for dim in range(mesh.ndim)]
        shape = (heads, end - begin, lanes)
        stride = torch.empty(shape).stride()
        sequence = DTensor.from_local(
            part.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride
        )
        pieces.append(sequence.full_tensor().reshape(-1, lanes))
        begin = end
    return torch.cat(pieces).view(x.shape)


def unseen(recipe: Recipe, kind: str) -> bool:
    """Where tokens are sharded, a rank has the keys that they see, and takes no other indices."""
    return getattr(recipe.case, "pattern", "") in ("future", "unread") and kind not in ("B", "B-")


def check(
    mesh_name: str, kind: str, operators: Sequence[str], part: slice
) -> dict[str, tuple[float, str]]:
    """The largest error of each operator over a part of its samples, and the sample that has it.

    `kind` is an axis for each mesh dimension ("BN": the first by batch, the second by heads, "-"
    for none). A call that it does not divide equally is an error.
    """
    enable_dtensor()
    mesh = mesh_of(mesh_name)
    worst: dict[str, tuple[float, str]] = {}
    with ascend_attn_ops.limits(None):
        for name in operators:
            for recipe in OPERATORS[name].recipes[part]:
                if unseen(recipe, kind):
                    continue
                sample = sample_of(recipe, kind, mesh.shape)
                place = by_axis(kind, sample)
                try:
                    if divides(kind, sample, mesh.shape):
                        found = errors_of(recipe, sample, mesh, place)
                        worst[name] = max(worst.get(name, (0.0, "")), (found, recipe.id))
                    else:
                        refused = rf"^ascend::{name}: \w+: expected .*, got"
                        with pytest.raises(ValueError, match=refused):
                            as_dtensors(sample, mesh, place).call(torch.ops.ascend)
                except Exception as failure:
                    raise AssertionError(f"{recipe.id} {kind} on {mesh_name}") from failure
    return worst


def gradients_of_statistics(mesh_name: str, axes: str, operator: str) -> float:
    """The largest error of gradients that flow into softmax_sum alone."""
    enable_dtensor()
    mesh = mesh_of(mesh_name)
    with ascend_attn_ops.limits(None):
        recipe = next(x for x in OPERATORS[operator].recipes if x.layout == "BSND")
        names = ("query", "key")
        sample = recipe.make(torch.float64)
        dtensors = as_dtensors(sample.requires_grad(names), mesh, by_axis(axes, sample))
        sample = sample.requires_grad(names)
        for call in (sample, dtensors):
            softmax_sum = call.call(torch.ops.ascend)[2]
            softmax_sum.backward(torch.ones_like(softmax_sum))
        pairs = [(dtensors.tensors[x].grad, sample.tensors[x].grad) for x in names]
        return max(error_of(x, y, sample) for x, y in pairs)  # type: ignore[arg-type]
