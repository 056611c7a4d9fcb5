"""The work of one rank in a call with DTensors, decided once for calls that are alike."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from ascend_attn_ops._torch import (
    DTensorSpec,
    LazyString,
    TensorMeta,
    is_tracing,
    redistribute_local_tensor,
    tensor_utils,
)
from ascend_attn_ops.device_limits import limits
from ascend_attn_ops.distributed._agreement import Report, raised, sendable
from ascend_attn_ops.distributed.dtensor import _tokens
from ascend_attn_ops.distributed.dtensor._axes import MORE, PER_SEQUENCE, axes_of
from ascend_attn_ops.distributed.dtensor._placements import (
    Choice,
    HeadsOfSequences,
    Part,
    Tensors,
)
from ascend_attn_ops.distributed.dtensor._signature import (
    Signature,
    as_list,
    map_tensors,
    meta_of,
    sizes_of,
    tensors_of,
)

# The context in which nothing is redistributed unasked. torch 2.9 and earlier have none.
EXPLICIT: Any = getattr(tensor_utils, "ExplicitRedistributionContext", None)

# Plain tensors that stand for the whole tensor, the same on all ranks: the library builds the
# compressed masks by itself, and lengths are numbers.
_LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")
# Lists with one number per batch; those of layout TND belong to the sequences.
_PER_BATCH = ("prefix", *_LENGTHS)
_PLAIN = ("atten_mask", *_PER_BATCH)

_AXIS_NAMES = {"B": "batch", "S": "query tokens", "N": "heads", "H": "heads of the indexer"}

Cut = tuple[int, int, int]  # dimension, begin, size


@dataclass
class Local:
    """One rank's part of a call: what its tensors become, and the values that differ."""

    cuts: dict[int, list[Cut]]
    values: dict[int, Any]
    # Where a result stands in a larger one that is zero elsewhere: its dimension, begin and size.
    pads: list[Cut | None]
    # The query tokens of this rank, if they are sharded and the lengths are tensors.
    tokens: Part | None
    # The heads of this rank, if the statistics are not sharded.
    heads: Part | None


class Plan:
    """All that a call needs besides its tensors."""

    def __init__(self, signature: Signature, values: Sequence[Any]) -> None:
        self.signature = signature
        self.call = signature.named(values)
        self.mesh = self._check_tensors()
        # Metadata of the call in one process. Limits apply to what each rank computes.
        with limits(None):
            whole = [map_tensors(value, meta_of) for value in self.call.values()]
            self.metas = as_list(signature.call(whole))
        self.axes = axes_of(signature.name, self.call)
        self.choice = self._choose()
        self.targets = {
            name: self.choice.inputs(self.axes.inputs.get(name, "")) for name in self._tensors()
        }
        for name, letters in self.axes.inputs.items():
            # Statistics saved by one process come whole, and this rank takes its heads.
            if letters == PER_SEQUENCE and name in self.targets and not self._saved_here(name):
                self.targets[name] = (Replicate(),) * self.mesh.ndim
        self.results = [
            DTensorSpec(
                self.mesh,
                self.choice.outputs(letters),
                tensor_meta=TensorMeta(meta.shape, meta.stride(), meta.dtype),
            )
            for meta, letters in zip(self.metas, self.axes.outputs, strict=True)
        ]
        self._check_every_rank()
        # A rank has the keys that its own tokens see: an index of another key, which one process
        # would pass over, is an error of one rank.
        self.agrees = "S" in self.choice.sharded and "sparse_indices" in self.axes.inputs
        self.coordinate = self.mesh.get_coordinate()
        if self.coordinate is not None:
            self.local = self._local(self.coordinate)
            self._prepare()
        # The plan outlives the call, and its tensors must not.
        self.call = {name: value for name, value in self.call.items() if not tensors_of(value)}

    def _tensors(self) -> Iterator[str]:
        for name, value in self.call.items():
            if tensors_of(value):
                yield name

    def _error(self, kind: type[Exception], argument: str, text: str) -> Exception:
        return kind(f"ascend::{self.signature.name}: {argument}: {text}")

    def _check_tensors(self) -> DeviceMesh:
        mesh: DeviceMesh | None = None
        first = ""
        for name in self._tensors():
            for tensor in tensors_of(self.call[name]):
                if not isinstance(tensor, DTensor):
                    self._check_plain(name)
                elif mesh is None:
                    mesh, first = tensor.device_mesh, name
                elif tensor.device_mesh != mesh:
                    text = f"expected the device mesh of {first}, {mesh}, got {tensor.device_mesh}"
                    raise self._error(ValueError, name, text)
        assert mesh is not None
        return mesh

    def _check_plain(self, name: str) -> None:
        if name in _PLAIN:
            return
        text = (
            "expected a DTensor, the bits of the whole mask on all ranks, got a plain tensor; "
            "dropout_p draws different bits on every rank"
            if name == "drop_mask"
            else "expected a DTensor beside DTensors, got a plain tensor; DTensor.from_local("
            "tensor, mesh, [Replicate()]) makes one of a tensor that all ranks have"
        )
        raise self._error(TypeError, name, text)

    def _choose(self) -> Choice:
        tensors = []
        for name in self._tensors():
            specs = [x._spec for x in tensors_of(self.call[name]) if isinstance(x, DTensor)]
            written = name in self.signature.written
            tensors.append(Tensors(name, self.axes.inputs.get(name, ""), specs, written))
        return Choice(self.signature.name, self.axes, self.mesh, tensors)

    def _saved_here(self, name: str) -> bool:
        return HeadsOfSequences() in self.call[name]._spec.placements

    def _local(self, coordinate: Sequence[int]) -> Local | None:
        """None for a rank that has nothing to compute."""
        call, axes = self.call, self.axes
        sharded = [axis for axis in dict.fromkeys(self.choice.sharded) if axis is not None]
        parts = {axis: self.choice.part(axis, coordinate) for axis in sharded}
        if any(part.size == 0 for part in parts.values()):
            return None
        local = Local({}, {}, [None] * len(self.results), None, None)
        for name, value in call.items():
            if isinstance(value, Tensor) and not isinstance(value, DTensor):
                for dim, axis in enumerate(axes.inputs.get(name, "")):
                    if axis in parts:
                        self._cut(local, name, dim, parts[axis])
        if "num_heads" in call and "N" in parts:
            self._take_heads(local, parts["N"])
        if "B" in parts and call.get("layout") != "TND":
            for name in _PER_BATCH:
                value = call.get(name)
                # One number may stand for all batches.
                if isinstance(value, list | tuple) and len(value) > 1:
                    part = parts["B"]
                    local.values[self.signature.index[name]] = list(value)[part.begin : part.end]
                elif axes.inputs.get(name) == MORE:
                    self._cut(local, name, 0, parts["B"])
        if "S" in parts and "T" in axes.sizes:
            self._take_tokens(local, parts["S"])
        return local

    def _cut(self, local: Local, name: str, dim: int, part: Part) -> None:
        index = self.signature.index[name]
        local.cuts.setdefault(index, []).append((dim, part.begin, part.size))

    def _take_heads(self, local: Local, part: Part) -> None:
        index, sizes = self.signature.index, self.axes.sizes
        local.values[index["num_heads"]] = part.size
        group = sizes["N"] // sizes["K"]
        key_heads = Part(part.begin // group, -(-part.end // group) - part.begin // group)
        if self.call.get("num_key_value_heads"):
            local.values[index["num_key_value_heads"]] = key_heads.size
        if any(
            letters == PER_SEQUENCE and not self._saved_here(name)
            for name, letters in self.axes.inputs.items()
        ):
            local.heads = part
        if self.choice.key_heads_sharded or sizes["K"] == 1:
            return
        for name, letters in self.axes.inputs.items():
            if "K" in letters:
                dim = letters.index("K")
                unit = sizes_of(self.call[name])[dim] // sizes["K"]
                self._cut(local, name, dim, Part(key_heads.begin * unit, key_heads.size * unit))
        for output, letters in enumerate(self.axes.outputs):
            if "K" in letters:
                dim = letters.index("K")
                size = self.metas[output].shape[dim]
                local.pads[output] = (dim, key_heads.begin * size // sizes["K"], size)

    def _take_tokens(self, local: Local, part: Part) -> None:
        call, axes, index = self.call, self.axes, self.signature.index
        # The lengths of this rank's batches.
        lengths = [local.values.get(index[x], call[x]) if x in call else None for x in _LENGTHS]
        if any(isinstance(x, Tensor) for x in lengths):
            local.tokens = part
            return
        if any(x is not None for x in lengths):
            on_host = (None if x is None else torch.tensor(x, dtype=torch.long) for x in lengths)
            for name, value in zip(_LENGTHS, self._cut_lengths(part, *on_host), strict=True):
                local.values[index[name]] = value.tolist()
            return
        keys = _tokens.visible_keys(axes.sizes["S"], axes.sizes["T"], part, call["sparse_mode"])
        if keys == axes.sizes["T"]:
            return
        for name, letters in axes.inputs.items():
            if "T" in letters:
                self._cut(local, name, letters.index("T"), Part(0, keys))
        for output, letters in enumerate(axes.outputs):
            if "T" in letters:
                local.pads[output] = (letters.index("T"), 0, axes.sizes["T"])

    def _finish(self, local: Local, values: list[Any]) -> None:
        """Make local what does not depend on where tensors come from."""
        index = self.signature.index
        for position, cuts in local.cuts.items():
            for dim, begin, size in cuts:
                values[position] = values[position].narrow(dim, begin, size)
        for position, value in local.values.items():
            values[position] = value
        if local.tokens is not None:
            first, second = (index[name] for name in _LENGTHS)
            values[first], values[second] = self._cut_lengths(
                local.tokens, values[first], values[second]
            )
        if local.heads is not None:
            ends = values[index[_LENGTHS[0]]]
            for name in ("softmax_max", "softmax_sum"):
                position = index[name]
                values[position] = _tokens.heads_of_sequences(values[position], ends, local.heads)

    def _cut_lengths(
        self, tokens: Part, query: Tensor | None, key: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The lengths of the sequences for a rank that has these query tokens."""
        mode, sizes = self.call["sparse_mode"], self.axes.sizes
        given = key if query is None else query
        assert given is not None
        if self.call["layout"] == "TND":
            assert query is not None
            assert key is not None
            return _tokens.packed_lengths(query, key, tokens, mode)
        query = torch.full_like(given, sizes["S"]) if query is None else query
        key = torch.full_like(given, sizes["T"]) if key is None else key
        return _tokens.padded_lengths(query, key, tokens, mode)

    def _check_every_rank(self) -> None:
        """Raise on all ranks what the operator would raise on one of them, before they meet."""
        seen: set[str] = set()
        for coordinate in itertools.product(*map(range, self.mesh.shape)):
            local = self._local(coordinate)
            shapes = self._local_shapes(coordinate)
            kind = repr((shapes, local))
            if local is None or kind in seen:
                continue
            seen.add(kind)
            # A tensor that is passed twice stays one: a device reads value from key.
            meta = functools.cache(meta_of)
            values = [
                map_tensors(value, functools.partial(meta, shape=shape))
                for value, shape in zip(self.call.values(), shapes, strict=True)
            ]
            self._finish(local, values)
            try:
                self.signature.call(values)
            except (NotImplementedError, TypeError, ValueError) as error:
                raise type(error)(f"{error}{self._describe()}") from None

    def _local_shapes(self, coordinate: Sequence[int]) -> list[Any]:
        def shape(name: str, value: Any) -> Any:
            tensors = tensors_of(value)
            if not tensors:
                return None
            placements = self.targets[name] if isinstance(tensors[0], DTensor) else ()
            return tuple(self.choice.local_shape(sizes_of(tensors[0]), placements, coordinate))

        return [shape(name, value) for name, value in self.call.items()]

    def _describe(self) -> str:
        """For an error that one process would not have raised."""
        sharded = (
            f"{_AXIS_NAMES.get(axis, 'rows')} over {self.mesh.size(dim)}"
            for dim, axis in enumerate(self.choice.sharded)
            if axis is not None
        )
        return ", for a rank's part: " + (", ".join(sharded) or "all, as nothing is sharded")

    def _prepare(self) -> None:
        """Note whose local tensors are used as they are, and what becomes of all others."""
        self.kept: list[int] = []
        self.moved: list[tuple[int, tuple[Placement, ...]]] = []
        for name in self._tensors():
            tensors, index = tensors_of(self.call[name]), self.signature.index[name]
            if not isinstance(tensors[0], DTensor):
                continue
            target = self.targets[name]
            if any(x._spec != _moved(x._spec, target) for x in tensors):
                self.moved.append((index, target))
            else:
                self.kept.append(index)

    def run(self, values: list[Any]) -> Any:
        if self.coordinate is None:
            return self._without_rank(values)
        if self.moved:
            self._move(values)
        for index in self.kept:
            value = values[index]
            lists = isinstance(value, list | tuple)
            values[index] = [x._local_tensor for x in value] if lists else value._local_tensor
        if self.local is None:
            first = next(x for value in values for x in tensors_of(value))
            if self.agrees:
                self._agree(first, None)
            return self._wrap(
                [
                    first.new_zeros(
                        self.choice.local_shape(meta.shape, spec.placements, self.coordinate),
                        dtype=meta.dtype,
                    )
                    for meta, spec in zip(self.metas, self.results, strict=True)
                ]
            )
        self._finish(self.local, values)
        results = self._agreed(values) if self.agrees else as_list(self.signature.call(values))
        for i, pad in enumerate(self.local.pads):
            if pad is not None:
                results[i] = _padded(results[i], pad)
        return self._wrap(results)

    def _agreed(self, values: list[Any]) -> list[Tensor]:
        results, failure = [], None
        try:
            results = as_list(self.signature.call(values))
        except Exception as error:
            failure = error
        self._agree(values[0], failure)
        return results

    def _agree(self, local: Tensor, failure: Exception | None) -> None:
        """Raise on all ranks what one of them raised; only the CPU reads values, and can."""
        if not local.is_cpu or is_tracing():
            if failure is not None:
                raise failure
            return
        groups = [self.mesh.get_group(dim) for dim in range(self.mesh.ndim)]
        failed = torch.tensor(failure is not None, dtype=torch.int32, device="cpu")
        for group in groups:
            dist.all_reduce(failed, dist.ReduceOp.MAX, group)
        if not failed:
            return
        report = sendable(failure)
        for group in groups:
            reports: list[Report | None] = [None] * group.size()
            dist.all_gather_object(reports, report, group)
            report = next((x for x in reports if x is not None), None)
        assert report is not None
        kind, message = report
        raise raised(kind, f"{message}{self._describe()}") from failure

    def _without_rank(self, values: list[Any]) -> Any:
        """Returns what torch's operators return on a rank outside of the mesh."""
        local = next(x for value in values for x in tensors_of(value)).to_local()
        return self._wrap([local.new_empty(0, dtype=meta.dtype) for meta in self.metas])

    def _wrap(self, results: list[Tensor]) -> Any:
        wrapped = tuple(
            DTensor(local, spec, requires_grad=False)
            for local, spec in zip(results, self.results, strict=True)
        )
        if len(wrapped) == 1:
            return wrapped[0]
        return wrapped or None

    def _move(self, values: list[Any]) -> None:
        """Redistribute; key and value, say, may be one tensor and then stay one."""
        specs: dict[int, DTensorSpec] = {}
        for index, target in self.moved:
            for x in tensors_of(values[index]):
                specs[id(x)] = _moved(x._spec, target)
                message = LazyString(self._message, index, x._spec, target)
                EXPLICIT.observe_redistribution(x._spec, specs[id(x)], message)
        done: dict[int, Tensor] = {}

        def move(x: Any) -> Tensor:
            if id(x) not in done:
                done[id(x)] = redistribute_local_tensor(x._local_tensor, x._spec, specs[id(x)])
            return done[id(x)]

        for index, _ in self.moved:
            values[index] = map_tensors(values[index], move)

    def _message(self, index: int, spec: DTensorSpec, target: tuple[Placement, ...]) -> str:
        name = self.signature.names[index]
        return (
            f"ascend::{self.signature.name}: {name}: expected placements {target}, which need no "
            f"redistribution here, got {spec.placements}"
        )


def _moved(spec: DTensorSpec, placements: tuple[Placement, ...]) -> DTensorSpec:
    return DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)


def _padded(result: Tensor, pad: Cut) -> Tensor:
    dim, begin, size = pad
    shape = list(result.shape)
    local, shape[dim] = shape[dim], size
    whole = result.new_zeros(shape)
    whole.narrow(dim, begin, local).copy_(result)
    return whole
