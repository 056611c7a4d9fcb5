"""Writes, errors and whole steps on the ranks of test_dtensor.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ascend_attn_ops as ops
import pytest
import sparse_layer
import torch
from ascend_attn_ops.distributed import enable_dtensor
from dtensor_cases import distribute, error, mesh_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

debug = pytest.importorskip("torch.distributed.tensor.debug", reason="numpy is not installed")

HEADS = 4


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def message_of(call: Callable[[], object]) -> str:
    """Returns the message of the error that a call raises before it communicates."""
    with debug.CommDebugMode() as communication:
        try:
            call()
        except (ValueError, TypeError, NotImplementedError, RuntimeError) as raised:
            assert communication.get_total_counts() == 0
            return f"{type(raised).__name__}: {raised}"
    return "no error"


def scatter(mesh_name: str, cache: list[Placement], key: list[Placement]) -> None:
    """Both caches of every rank are its part of what one process writes."""
    enable_dtensor()
    mesh = mesh_of(mesh_name)
    rows, slots = numbers(5, HEADS, 8), torch.tensor([3, -1, 11, 0, 6])
    caches = [numbers(4, 3, HEADS, 8, seed=seed) for seed in (1, 2)]
    placed = [distribute(x, mesh, cache) for x in caches]
    arguments = distribute(rows, mesh, key), distribute(slots, mesh, [Replicate()] * mesh.ndim)
    with torch.no_grad(), ops.limits(None):
        ops.scatter_pa_kv_cache_(rows, caches[0], slots, rows, caches[1])
        ops.scatter_pa_kv_cache_(arguments[0], placed[0], arguments[1], arguments[0], placed[1])
    for actual, expected in zip(placed, caches, strict=True):
        assert torch.equal(actual.full_tensor(), expected)
        assert torch.equal(actual.to_local(), distribute(expected, mesh, cache).to_local())


def refused_write(key_cache: list[Placement], value_cache: list[Placement], mode: str) -> str:
    """The message; what the caches held stays."""
    enable_dtensor()
    mesh = mesh_of("2")
    shape = (4, 3, HEADS, 8) if mode == "Norm" else (4, HEADS, 3, 8)
    x = numbers(*shape, dtype=torch.float32)
    caches = [distribute(x, mesh, placements) for placements in (key_cache, value_cache)]
    before = [cache.to_local().clone() for cache in caches]
    rows = distribute(numbers(5, HEADS, 8, dtype=torch.float32), mesh, [Replicate()])
    slots = distribute(torch.arange(5), mesh, [Replicate()])
    arguments = rows, caches[0], slots, rows, caches[1]
    with torch.no_grad(), ops.limits(None):
        message = message_of(lambda: ops.scatter_pa_kv_cache_(*arguments, cache_mode=mode))
    assert all(map(torch.equal, (x.to_local() for x in caches), before))
    return message


def attention(mesh: DeviceMesh, n1: int = HEADS, **changes: Any) -> Callable[[], Any]:
    """A call of sparse_flash_attention within the device's limits, with sharded heads."""

    def placed(*shape: int, at: Placement | None = None) -> Tensor:
        return distribute(numbers(*shape, dtype=torch.bfloat16), mesh, [at or Replicate()])

    heads = changes.pop("heads", Shard(2))
    indices = torch.full((1, 2, 1, 1024), -1, dtype=torch.int32)
    indices[..., :2] = torch.arange(2)
    latent = placed(1, 3, 1, 512)
    arguments: dict[str, Any] = {
        "query": placed(1, 2, n1, 512, at=heads), "key": latent, "value": latent,
        "sparse_indices": distribute(indices, mesh, [Replicate()]),
        "query_rope": placed(1, 2, n1, 64, at=heads), "key_rope": placed(1, 3, 1, 64),
        "scale_value": 0.05, **changes,
    }  # fmt: skip
    return lambda: ops.sparse_flash_attention(**arguments)


def limits_of_parts(heads: Placement) -> str:
    """The device takes at most 128 query heads."""
    enable_dtensor()
    with ops.limits("A2"):
        return message_of(attention(mesh_of("2"), 256, heads=heads))


def compared() -> tuple[int, int]:
    """How many calls of a rank's part `compare` has seen, and how many of them differ."""
    enable_dtensor()
    query = distribute(numbers(1, 4, 4, 16, dtype=torch.float32), mesh_of("4"), [Shard(1)])
    with ops.limits(None), ops.compare() as report:
        ops.flash_attention_score(query, query, query, num_heads=4, layout="BNSD")
    return report.compared["flash_attention_score"], len(report.differences)


def wrong_key_rope(what: str) -> str:
    """A plain tensor, one on another mesh, a short one, and two that had to be moved."""
    enable_dtensor()
    mesh = mesh_of("2")
    plain = numbers(1, 3, 1, 64, dtype=torch.bfloat16)
    rope = {
        "plain": plain, "mesh": distribute(plain, mesh_of("4"), [Replicate()]),
        "shape": distribute(plain[:, :2], mesh, [Replicate()]),
        "tokens": distribute(plain, mesh, [Shard(1)]),
        "sum": distribute(plain, mesh, [Partial()]),
    }[what]  # fmt: skip
    return message_of(attention(mesh, key_rope=rope))


def wrong_query(at: Placement) -> str:
    enable_dtensor()
    mesh = mesh_of("4")
    whole = [Replicate()]
    x = numbers(1, 3, 6, 8)
    query = DTensor.from_local(x, mesh, [at], run_check=False, shape=x.shape, stride=x.stride())
    key = distribute(numbers(1, 3, 1, 8), mesh, whole)
    indices = distribute(torch.zeros(1, 3, 1, 1, dtype=torch.int32), mesh, whole)
    with ops.limits(None):
        return message_of(
            lambda: ops.sparse_flash_attention(query, key, key, indices, scale_value=1.0)
        )


def communication(of_query: Placement, of_key: Placement) -> int:
    """How many collectives a forward and a backward need whose tensors lie as they should."""
    enable_dtensor()
    mesh = mesh_of("4")
    query = distribute(numbers(4, 3, 8, 16), mesh, [of_query]).requires_grad_()
    key = distribute(numbers(4, 3, 1, 16), mesh, [of_key]).requires_grad_()
    selected = distribute(torch.zeros(4, 3, 1, 1, dtype=torch.int32), mesh, [of_key])
    with ops.limits(None), debug.CommDebugMode() as counted:
        out, *_ = ops.sparse_flash_attention(query, key, key, selected, scale_value=1.0)
        out.backward(out.detach())
    assert isinstance(key.grad, DTensor)
    assert key.grad.placements == (Partial() if of_key == Replicate() else of_key,)
    return int(counted.get_total_counts())


def whole_step(
    mesh_name: str, batch: int, placements: list[str], tokens: int = 8, compiled: bool = False
) -> float:
    """The error of a step whose heads, or batch, or tokens are sharded; "BN" and so on."""
    enable_dtensor()
    mesh = mesh_of(mesh_name)
    sizes = sparse_layer.Sizes(HEADS, 16, 8, 2, 16, count=3)
    packed = sparse_layer.inputs([tokens] * batch, torch.float64, sizes)
    del packed["d_out"]

    def loss(x: dict[str, Tensor], reduction: str) -> Tensor:
        """Returns what a layer of sparse attention adds to the loss."""
        where, reduced = {"layout": "BSND"}, {"reduction": reduction}
        found = sparse_layer.forward(x, ops, sizes, where, loss=reduced)
        return found["loss"] + found["out"].square().sum()

    step = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    largest = 0.0
    for reduction in ("mean",) if compiled else ("sum", "mean"):
        leaves, dtensors = {}, {}
        for name, x in packed.items():
            axes = {"B": 0} if name in sparse_layer.KEYS else {"B": 0, "S": 1}
            axes |= {"N": 2} if name in ("query", "query_rope") else {}
            chosen = [Shard(axes[axis]) if axis in axes else Replicate() for axis in placements]
            leaves[name] = x.unflatten(0, (batch, tokens)).requires_grad_()
            dtensors[name] = distribute(leaves[name], mesh, chosen).requires_grad_()
        with ops.limits(None):
            expected, actual = loss(leaves, reduction), step(dtensors, reduction)
            expected.backward()
            actual.backward()
        pairs = [(actual.detach(), expected.detach())]
        pairs += [(dtensors[name].grad, x.grad) for name, x in leaves.items()]
        for x, y in pairs:
            assert isinstance(x, DTensor)
            assert y is not None
            largest = max(largest, error(x.full_tensor(), y))
    return largest


def with_sinks(
    mesh_name: str, by: Sequence[Placement], sink_at: Sequence[Placement],
    gradient_at: Sequence[Placement], dtype: torch.dtype,
) -> None:  # fmt: skip
    """Query, key and value by heads or by batches, and a sink with placements of its own."""
    enable_dtensor()
    mesh = mesh_of(mesh_name)
    whole = [numbers(4, 8, 9, 16, seed=i).requires_grad_() for i in range(3)]
    whole.append(torch.linspace(-2, 2, 8).to(dtype).requires_grad_())
    places = [by, by, by, sink_at]
    placed = [distribute(x, mesh, at).requires_grad_() for x, at in zip(whole, places, strict=True)]
    d_out = numbers(4, 8, 9, 16, seed=3)
    with ops.limits(None):
        for leaves, d in ((whole, d_out), (placed, distribute(d_out, mesh, by))):
            *x, sink = leaves
            out, *_ = ops.flash_attention_score(*x, sink=sink, num_heads=8, layout="BNSD")
            out.backward(d)
    assert out.placements == tuple(by)
    assert placed[3].grad.placements == tuple(gradient_at)
    for x, leaf in zip(placed, whole, strict=True):
        gradient = x.grad.full_tensor()
        assert gradient.dtype == leaf.dtype
        # Summands of a half precision sink are rounded before they are summed.
        close = 1e-13 if leaf.dtype == torch.float64 else 2**-7
        assert sparse_layer.relative_error(gradient, leaf.grad) <= close
