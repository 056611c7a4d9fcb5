"""Writes, errors and whole steps on the ranks of test_dtensor.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops.distributed import dtensor, enable_dtensor
from ascend_attn_ops.distributed.dtensor._plan import EXPLICIT
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


def scatter(mesh_name: str, heads: int, cache: list[Placement], key: list[Placement]) -> None:
    """Both caches of every rank are its part of what one process writes."""
    enable_dtensor()
    mesh = mesh_of(mesh_name)
    rows, slots = numbers(5, heads, 8), torch.tensor([3, -1, 11, 0, 6])
    caches = [numbers(4, 3, heads, 8, seed=seed) for seed in (1, 2)]
    placed = [distribute(x, mesh, cache) for x in caches]
    arguments = distribute(rows, mesh, key), distribute(slots, mesh, [Replicate()] * mesh.ndim)
    with torch.no_grad(), ops.limits(None):
        ops.scatter_pa_kv_cache_(rows, caches[0], slots, rows, caches[1])
        ops.scatter_pa_kv_cache_(arguments[0], placed[0], arguments[1], arguments[0], placed[1])
    for actual, expected in zip(placed, caches, strict=True):
        assert torch.equal(actual.full_tensor(), expected)
        assert torch.equal(actual.to_local(), distribute(expected, mesh, cache).to_local())


def refused_write(
    mesh_name: str, key_cache: list[Placement], value_cache: list[Placement], mode: str = "Norm"
) -> str:
    """The message; what the caches held stays."""
    enable_dtensor()
    mesh = mesh_of(mesh_name)
    shape = (4, 3, HEADS, 8) if mode == "Norm" else (4, HEADS, 3, 8)
    caches = [
        distribute(numbers(*shape, seed=seed, dtype=torch.float32), mesh, placements)
        for seed, placements in ((1, key_cache), (2, value_cache))
    ]
    before = [cache.to_local().clone() for cache in caches]
    replicated = [Replicate()] * mesh.ndim
    rows = distribute(numbers(5, HEADS, 8, dtype=torch.float32), mesh, replicated)
    slots = distribute(torch.arange(5), mesh, replicated)
    with torch.no_grad(), ops.limits(None):
        message = message_of(
            lambda: ops.scatter_pa_kv_cache_(
                rows, caches[0], slots, rows, caches[1], cache_mode=mode
            )
        )
    for cache, x in zip(caches, before, strict=True):
        assert torch.equal(cache.to_local(), x)
    return message


def attention(
    mesh: DeviceMesh, heads: list[Placement], n1: int = HEADS, **changes: Any
) -> Callable[[], Any]:
    """A call of sparse_flash_attention within the device's limits, with sharded heads."""
    replicated = [Replicate()] * mesh.ndim

    def bfloat16(*shape: int) -> Tensor:
        return numbers(*shape, dtype=torch.bfloat16)

    indices = torch.full((1, 2, 1, 1024), -1, dtype=torch.int32)
    indices[..., :2] = torch.arange(2)
    latent = distribute(bfloat16(1, 3, 1, 512), mesh, replicated)
    arguments: dict[str, Any] = {
        "query": distribute(bfloat16(1, 2, n1, 512), mesh, heads),
        "key": latent,
        "value": latent,
        "sparse_indices": distribute(indices, mesh, replicated),
        "query_rope": distribute(bfloat16(1, 2, n1, 64), mesh, heads),
        "key_rope": distribute(bfloat16(1, 3, 1, 64), mesh, replicated),
        "scale_value": 0.05,
        **changes,
    }
    return lambda: ops.sparse_flash_attention(**arguments)


def limits_of_parts(n1: int, sharded: bool) -> str:
    """The device takes at most 128 query heads."""
    enable_dtensor()
    mesh = mesh_of("2")
    with ops.limits("A2"):
        return message_of(attention(mesh, [Shard(2) if sharded else Replicate()], n1))


def compared() -> tuple[int, int]:
    """How many calls of a rank's part `compare` has seen, and how many of them differ."""
    enable_dtensor()
    query = distribute(numbers(1, 4, 4, 16, dtype=torch.float32), mesh_of("4"), [Shard(1)])
    with ops.limits(None), ops.compare() as report:
        ops.flash_attention_score(query, query, query, num_heads=4, layout="BNSD")
    return report.compared["flash_attention_score"], len(report.differences)


def wrong_arguments() -> dict[str, str]:
    enable_dtensor()
    mesh = mesh_of("2")
    plain = numbers(1, 3, 1, 64, dtype=torch.bfloat16)
    other = distribute(plain, mesh_of("4"), [Replicate()])
    shorter = distribute(plain[:, :2], mesh, [Shard(1)])
    shape = (1, 4, 4, 16)
    query = distribute(numbers(*shape, dtype=torch.float32), mesh, [Shard(0)])
    drop_mask = torch.ones(16, dtype=torch.uint8)
    return {
        "plain": message_of(attention(mesh, [Shard(2)], key_rope=plain)),
        "mesh": message_of(attention(mesh, [Shard(2)], key_rope=other)),
        "shape": message_of(attention(mesh, [Shard(2)], key_rope=shorter)),
        "drop_mask": message_of(
            lambda: ops.flash_attention_score(
                query, query, query, num_heads=4, layout="BNSD", drop_mask=drop_mask, keep_prob=0.5
            )
        ),
    }


def implicit_redistribution() -> str:
    enable_dtensor()
    mesh = mesh_of("2")
    rope = distribute(numbers(1, 3, 1, 64, dtype=torch.bfloat16), mesh, [Shard(1)])
    with EXPLICIT():
        return message_of(attention(mesh, [Shard(2)], key_rope=rope))


def unseen_index() -> str:
    """Only the first rank's token selects a key that later tokens see."""
    enable_dtensor()
    mesh = mesh_of("4")
    x = numbers(1, 4, 1, 8)
    indices = torch.zeros(1, 4, 1, 1, dtype=torch.int32)
    indices[0, 0] = 3
    tokens, replicated = [Shard(1)], [Replicate()]
    query = distribute(x, mesh, tokens)
    key = distribute(x, mesh, replicated)
    selected = distribute(indices, mesh, tokens)
    with ops.limits(None):
        try:
            ops.sparse_flash_attention(query, key, key, selected, scale_value=1.0)
        except ValueError as raised:
            return str(raised)
    return "no error"


def communication(axis: str) -> int:
    """How many collectives a forward and a backward need whose tensors lie as they should."""
    enable_dtensor()
    mesh = mesh_of("4")
    at: dict[str, tuple[int | None, int | None]] = {"B": (0, 0), "N": (2, None)}
    x, y = at[axis]
    query = distribute(numbers(4, 3, 8, 16), mesh, [Replicate() if x is None else Shard(x)])
    key = distribute(numbers(4, 3, 1, 16), mesh, [Replicate() if y is None else Shard(y)])
    indices = torch.zeros(4, 3, 1, 1, dtype=torch.int32)
    selected = distribute(indices, mesh, [Replicate() if y is None else Shard(y)])
    query.requires_grad_()
    key.requires_grad_()
    with ops.limits(None), debug.CommDebugMode() as counted:
        out, *_ = ops.sparse_flash_attention(query, key, key, selected, scale_value=1.0)
        out.backward(out.detach())
    assert isinstance(key.grad, DTensor)
    assert key.grad.placements == (Partial() if y is None else Shard(y),)
    return int(counted.get_total_counts())


def step(
    tensors: dict[str, Tensor], reduction: str, compiled: bool = False
) -> tuple[Tensor, list[Tensor | None]]:
    """The losses of a layer of sparse attention, and the gradients of all its tensors."""

    def losses(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        indices, _ = ops.lightning_indexer(x["q_index"], x["k_index"], x["w"], sparse_count=3)
        out, *statistics = ops.sparse_flash_attention(
            x["q"], x["c"], x["c"], indices, scale_value=0.3, query_rope=x["qr"], key_rope=x["kr"]
        )
        kl = ops.lightning_indexer_kl_loss(
            x["q"],
            x["c"],
            x["q_index"],
            x["k_index"],
            x["w"],
            indices,
            *statistics,
            scale_value=0.3,
            query_rope=x["qr"],
            key_rope=x["kr"],
            reduction=reduction,  # type: ignore[arg-type]
        )
        return kl, (out * out).sum()

    run = torch.compile(losses, fullgraph=True, backend="aot_eager") if compiled else losses
    kl, squares = run(tensors)
    (kl + squares).backward()
    return (kl + squares).detach(), [x.grad for x in tensors.values()]


def layer(heads: int, batch: int, tokens: int) -> dict[str, Tensor]:
    return {
        "q": numbers(batch, tokens, heads, 16),
        "qr": numbers(batch, tokens, heads, 8),
        "c": numbers(batch, tokens, 1, 16),
        "kr": numbers(batch, tokens, 1, 8),
        "q_index": numbers(batch, tokens, 2, 16),
        "k_index": numbers(batch, tokens, 1, 16),
        "w": numbers(batch, tokens, 2),
    }


def whole_step(
    mesh_name: str, batch: int, placements: list[str], tokens: int = 7, compiled: bool = False
) -> float:
    """The error of a step whose heads, or batch, or tokens are sharded; "BN" and so on."""
    enable_dtensor()
    mesh = mesh_of(mesh_name)
    largest = 0.0
    reductions = ("mean",) if compiled else ("sum", "mean")
    for reduction in reductions:
        tensors = layer(3 if batch == 3 else HEADS, batch, tokens)
        dtensors: dict[str, Tensor] = {}
        for name, x in tensors.items():
            axes = {"B": 0, "S": 1} | ({"N": 2} if name in ("q", "qr") else {})
            chosen = [Shard(axes[axis]) if axis in axes else Replicate() for axis in placements]
            dtensors[name] = distribute(x, mesh, chosen).requires_grad_()
        with ops.limits(None):
            expected = step({name: x.requires_grad_() for name, x in tensors.items()}, reduction)
            actual = step(dtensors, reduction, compiled)
        pairs = [(actual[0], expected[0]), *zip(actual[1], expected[1], strict=True)]
        for x, y in pairs if mesh.get_coordinate() else ():
            assert isinstance(x, DTensor)
            assert y is not None
            largest = max(largest, error(x.full_tensor(), y))
    return largest


def decisions() -> tuple[int, int]:
    """How many a second call adds, and one with other sizes."""
    enable_dtensor()
    mesh = mesh_of("2")
    with ops.limits("A2"):
        attention(mesh, [Shard(2)])()
        first = len(dtensor._plans)
        attention(mesh, [Shard(2)])()
        second = len(dtensor._plans)
        attention(mesh, [Shard(2)], n1=8)()
        return second - first, len(dtensor._plans) - second
