"""The work of one rank in a call with DTensors, decided once for calls that are alike."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.nn.functional import pad

from ascend_attn_ops._core.arguments import wrong
from ascend_attn_ops._core.device_limits import limits
from ascend_attn_ops._core.torch_private import (
    DTensorSpec,
    TensorMeta,
    is_tracing,
    redistribute_local_tensor,
    tensor_utils,
)
from ascend_attn_ops.distributed._agreement import Agreement, raised
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
    map_tensors,
    meta_of,
    number,
    sizes_of,
    tensors_of,
)

# The context in which nothing is redistributed unasked. torch 2.9 and earlier have none.
EXPLICIT: Any = getattr(tensor_utils, "ExplicitRedistributionContext", None)

_LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")
# Plain tensors that stand for the whole tensor, the same on all ranks: the library builds the
# compressed masks by itself, and lengths were numbers.
_PLAIN = ("atten_mask", "prefix", *_LENGTHS)
_AXIS_NAMES = {"B": "batch", "S": "query tokens", "N": "heads", "H": "heads of the indexer"}

Cut = tuple[int, int, int]  # dimension, begin, size


@dataclass
class Local:
    """One rank's part of a call: what its tensors become, and the values that differ."""

    cuts: dict[str, list[Cut]]
    values: dict[str, Any]
    # Where a result stands in a larger one that is zero elsewhere: its dimension, begin and size.
    pads: list[Cut | None]
    # The query tokens of this rank, if they are sharded and the call has lengths.
    tokens: Part | None
    # The heads of this rank, if the statistics are not sharded.
    heads: Part | None


class Plan:
    """All that a call needs besides its tensors."""

    def __init__(self, signature: Signature, values: Mapping[str, Any]) -> None:
        self.signature, self.where = signature, f"ascend::{signature.name}"
        self.call = {name: number(value) for name, value in values.items()}
        self.mesh = self._check_tensors()
        # Metadata of the call in one process. Limits apply to what each rank computes.
        with limits(None):
            self.metas = signature.call(
                {name: map_tensors(value, meta_of) for name, value in self.call.items()}
            )
        self.axes = axes_of(signature.name, self.call)
        tensors = [
            Tensors(
                name,
                self.axes.inputs.get(name, ""),
                [x._spec for x in tensors_of(self.call[name]) if isinstance(x, DTensor)],
                name in signature.written,
            )
            for name in self._tensors()
        ]
        self.choice = Choice(signature.name, self.axes, self.mesh, tensors)
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

    def _check_tensors(self) -> DeviceMesh:
        mesh: DeviceMesh | None = None
        first = ""
        for name in self._tensors():
            for tensor in tensors_of(self.call[name]):
                if not isinstance(tensor, DTensor):
                    if name not in _PLAIN:
                        got = "a plain tensor; DTensor.from_local(tensor, mesh, [Replicate()]) "
                        got += "makes one of a tensor that all ranks have"
                        if name == "drop_mask":
                            got = "a plain tensor; dropout_p draws different bits on every rank"
                        expected = "a DTensor beside DTensors"
                        raise wrong(TypeError, self.where, name, expected, got)
                elif mesh is None:
                    mesh, first = tensor.device_mesh, name
                elif tensor.device_mesh != mesh:
                    expected = f"the device mesh of {first}, {mesh}"
                    raise wrong(ValueError, self.where, name, expected, str(tensor.device_mesh))
        assert mesh is not None
        return mesh

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
        for name, letters in axes.inputs.items():
            plain = isinstance(call[name], Tensor) and not isinstance(call[name], DTensor)
            for dim, letter in enumerate(letters):
                axis = "B" if letter == MORE else letter
                if axis in parts and (plain or letter == MORE):
                    self._cut(local, name, dim, parts[axis])
        if "num_heads" in call and "N" in parts:
            self._take_heads(local, parts["N"])
        if "S" in parts and "T" in axes.sizes:
            if any(call.get(name) is not None for name in _LENGTHS):
                local.tokens = parts["S"]
            elif later := _tokens.unseen_keys(axes.sizes["S"], parts["S"], call["sparse_mode"]):
                self._take_axis(local, "T", Part(0, axes.sizes["T"] - later))
        return local

    def _cut(self, local: Local, name: str, dim: int, part: Part) -> None:
        local.cuts.setdefault(name, []).append((dim, part.begin, part.size))

    def _take_heads(self, local: Local, part: Part) -> None:
        sizes = self.axes.sizes
        local.values["num_heads"] = part.size
        group = sizes["N"] // sizes["K"]
        key_heads = Part(part.begin // group, -(-part.end // group) - part.begin // group)
        if self.call.get("num_key_value_heads"):
            local.values["num_key_value_heads"] = key_heads.size
        if any(
            letters == PER_SEQUENCE and not self._saved_here(name)
            for name, letters in self.axes.inputs.items()
        ):
            local.heads = part
        if not self.choice.key_heads_sharded and sizes["K"] > 1:
            self._take_axis(local, "K", key_heads)

    def _take_axis(self, local: Local, axis: str, part: Part) -> None:
        """Takes a part of an axis that is not sharded, which may be merged with another one."""
        for name, letters in self.axes.inputs.items():
            if axis in letters:
                dim = letters.index(axis)
                unit = sizes_of(self.call[name])[dim] // self.axes.sizes[axis]
                self._cut(local, name, dim, Part(part.begin * unit, part.size * unit))
        for output, letters in enumerate(self.axes.outputs):
            if axis in letters:
                dim = letters.index(axis)
                size = self.metas[output].shape[dim]
                local.pads[output] = (dim, part.begin * size // self.axes.sizes[axis], size)

    def _finish(self, local: Local, values: dict[str, Any]) -> None:
        """Make local what does not depend on where tensors come from."""
        for name, cuts in local.cuts.items():
            for dim, begin, size in cuts:
                values[name] = values[name].narrow(dim, begin, size)
        values.update(local.values)
        if local.tokens is not None:
            query, key = (values[name] for name in _LENGTHS)
            part, mode = local.tokens, self.call["sparse_mode"]
            if self.call["layout"] == "TND":
                cut = _tokens.packed_lengths(query, key, part, mode)
            else:
                cut = _tokens.padded_lengths(query, key, part, mode, self.axes.sizes)
            values.update(zip(_LENGTHS, cut, strict=True))
        if local.heads is not None:
            for name in ("softmax_max", "softmax_sum"):
                values[name] = _tokens.heads_of_sequences(
                    values[name], values[_LENGTHS[0]], local.heads
                )

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
            values = {
                name: map_tensors(value, functools.partial(meta, shape=shapes.get(name)))
                for name, value in self.call.items()
            }
            self._finish(local, values)
            try:
                self.signature.call(values)
            except (NotImplementedError, TypeError, ValueError) as error:
                raise type(error)(f"{error}{self._describe()}") from None

    def _local_shapes(self, coordinate: Sequence[int]) -> dict[str, Any]:
        shapes = {}
        for name in self._tensors():
            first = tensors_of(self.call[name])[0]
            placements = self.targets[name] if isinstance(first, DTensor) else ()
            shapes[name] = tuple(self.choice.local_shape(sizes_of(first), placements, coordinate))
        return shapes

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
        self.moved: dict[str, tuple[Placement, ...]] = {}
        self.kept: list[str] = []
        for name in self._tensors():
            tensors, target = tensors_of(self.call[name]), self.targets[name]
            if any(isinstance(x, DTensor) and x._spec != _moved(x._spec, target) for x in tensors):
                self.moved[name] = target
            elif isinstance(tensors[0], DTensor):
                self.kept.append(name)

    def run(self, values: dict[str, Any]) -> Any:
        if self.coordinate is None:
            return self._without_rank(values)
        self._make_local(values)
        results, failure = [], None
        try:
            results = self._results(values)
        except Exception as error:
            if not self.agrees:
                raise
            failure = error
        if self.agrees:
            self._agree(failure, next(iter(values.values())))
        return self._wrap(results)

    def _results(self, values: dict[str, Any]) -> list[Tensor]:
        if self.local is None:
            assert self.coordinate is not None
            first = next(x for value in values.values() for x in tensors_of(value))
            coordinate = self.coordinate
            return [
                first.new_zeros(
                    self.choice.local_shape(meta.shape, spec.placements, coordinate),
                    dtype=meta.dtype,
                )
                for meta, spec in zip(self.metas, self.results, strict=True)
            ]
        self._finish(self.local, values)
        results = self.signature.call(values)
        for i, cut in enumerate(self.local.pads):
            if cut is not None:
                results[i] = _padded(results[i], cut)
        return results

    def _agree(self, failure: Exception | None, local: Tensor) -> None:
        """Raise on all ranks what one of them raised; only the CPU reads values, and can."""
        if not local.is_cpu or is_tracing():
            if failure is not None:
                raise failure
            return
        told = failure
        for dim in range(self.mesh.ndim):
            try:
                agreement = Agreement(self.mesh.get_group(dim))
                agreement.vote(self.where, {}, error=told)
            except Exception as error:
                told = error
        if told is not None:
            raise raised(type(told).__name__, f"{told}{self._describe()}") from failure

    def _without_rank(self, values: dict[str, Any]) -> Any:
        """Returns what torch's operators return on a rank outside of the mesh."""
        local = next(x for value in values.values() for x in tensors_of(value)).to_local()
        return self._wrap([local.new_empty(0, dtype=meta.dtype) for meta in self.metas])

    def _wrap(self, results: list[Tensor]) -> Any:
        wrapped = tuple(
            DTensor(local, spec, requires_grad=False)
            for local, spec in zip(results, self.results, strict=True)
        )
        if len(wrapped) == 1:
            return wrapped[0]
        return wrapped or None

    def _make_local(self, values: dict[str, Any]) -> None:
        """Redistribute; key and value, say, may be one tensor and then stay one."""
        specs: dict[int, DTensorSpec] = {}
        for name, target in self.moved.items():
            for x in tensors_of(values[name]):
                specs[id(x)] = _moved(x._spec, target)
                message = (
                    f"{self.where}: {name}: expected placements {target}, which need no "
                    f"redistribution here, got {x._spec.placements}"
                )
                EXPLICIT.observe_redistribution(x._spec, specs[id(x)], message)
        done: dict[int, Tensor] = {}

        def local(x: Any) -> Tensor:
            if id(x) in specs and id(x) not in done:
                done[id(x)] = redistribute_local_tensor(x._local_tensor, x._spec, specs[id(x)])
            return done.get(id(x), x._local_tensor)

        for name in (*self.moved, *self.kept):
            values[name] = map_tensors(values[name], local)


def _moved(spec: DTensorSpec, placements: tuple[Placement, ...]) -> DTensorSpec:
    return DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)


def _padded(result: Tensor, cut: Cut) -> Tensor:
    dim, begin, size = cut
    end = size - begin - result.shape[dim]
    return pad(result, [0, 0] * (result.dim() - 1 - dim) + [begin, end])
