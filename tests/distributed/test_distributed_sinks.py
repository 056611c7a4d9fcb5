"""Attention sinks as parameters of models on several ranks: FSDP, tensor parallelism, compiled."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import ascend_attn_ops as ops
import dtensor_cases
import pytest
import torch
from ascend_attn_ops import distributed
from ascend_attn_ops.distributed import SequenceShards, enable_dtensor
from ascend_attn_ops.distributed.dtensor._plan import EXPLICIT
from sparse_layer import relative_error
from support.processes import on_ranks, rank_counts
from support.turns import nightly
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils.checkpoint import checkpoint

HEADS, KEY_HEADS, DIM, WIDTH = 6, 6, 8, 20
LENGTHS = [19, 6, 40]
METHODS = ["allgather", "ring", "ulysses"]
takes_dtensors = pytest.mark.skipif(
    EXPLICIT is None, reason=f"enable_dtensor() refuses torch {torch.__version__}"
)


class Attention(nn.Module):
    """A layer with sinks, of local tokens with shards or of all tokens without."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query = nn.Linear(WIDTH, HEADS * DIM)
        self.key = nn.Linear(WIDTH, KEY_HEADS * DIM)
        self.sinks = nn.Parameter(torch.linspace(-2, 2, HEADS))
        self.double()

    def forward(
        self, x: Tensor, shards: SequenceShards | None = None, method: Any = "allgather"
    ) -> Tensor:
        query, key = (layer(x).unflatten(-1, (-1, DIM)) for layer in (self.query, self.key))
        options: dict[str, Any] = {"num_heads": HEADS, "sparse_mode": 3, "sink": self.sinks}
        if shards is not None:
            out, *_ = distributed.flash_attention_score(
                query, key, key.flip(-1), shards=shards, method=method, **options
            )
        else:
            ends = list(accumulate(LENGTHS))
            out, *_ = ops.flash_attention_score(
                query, key, key.flip(-1), layout="TND", actual_seq_lengths_query=ends,
                actual_seq_lengths_key=ends, **options,
            )  # fmt: skip
        return out.sin().sum()


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(LENGTHS), WIDTH, generator=generator, dtype=torch.float64)


def fully_sharded(group: ProcessGroup, method: str) -> None:
    """The sinks, too, are divided among the ranks; their gradients are those of one process."""
    alone, model = Attention(), Attention()
    with ops.limits(None):
        alone(tokens()).backward()
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
        assert model.sinks.to_local().shape == (HEADS // group.size(),)
        shards = SequenceShards(LENGTHS, group)
        # FSDP averages over the ranks, which hold summands.
        (group.size() * model(shards.shard(tokens()), shards, method)).backward()
    parameters = dict(model.named_parameters())
    for name, parameter in alone.named_parameters():
        gradient = parameters[name].grad.full_tensor()
        assert parameter.grad.any()
        assert relative_error(gradient, parameter.grad) <= 1e-13, name
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    expected = alone.sinks - 0.1 * alone.sinks.grad
    torch.testing.assert_close(model.sinks.full_tensor(), expected)


@rank_counts(3, 2)
@pytest.mark.parametrize("method", METHODS)
def test_fsdp(method: str, ranks: int) -> None:
    on_ranks(ranks, fully_sharded, method)


def in_a_step(group: ProcessGroup, method: str) -> None:
    """Compiled, recomputed and under autocast: as without, sinks in float32."""
    model = Attention()
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group)
        x = shards.shard(tokens())
        parameters = list(model.parameters())
        expected = model(x, shards, method)
        wanted = torch.autograd.grad(expected, parameters)
        steps = {"recomputed": checkpoint(model, x, shards, method, use_reentrant=False)}
        if method != "ring":
            torch._dynamo.reset()
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            steps["compiled"] = compiled(x, shards, method)
        for name, loss in steps.items():
            assert torch.equal(loss, expected), name
            for d, y in zip(torch.autograd.grad(loss, parameters), wanted, strict=True):
                assert torch.equal(d, y), name

        query = x[:, :1, None].float().expand(-1, HEADS, DIM)
        sink = torch.full((HEADS,), 1.00390625 + 2**-20, requires_grad=True)
        options: dict[str, Any] = {"num_heads": HEADS, "shards": shards, "method": method}
        half = query.bfloat16()
        expected, *_ = distributed.flash_attention_score(half, half, half, sink=sink, **options)
        with torch.autocast("cpu", torch.bfloat16):
            out, *_ = distributed.flash_attention_score(query, query, query, sink=sink, **options)
        assert torch.equal(out, expected)
        (d_sink,) = torch.autograd.grad(out.float().sum(), sink)
        assert d_sink.dtype == torch.float32


@rank_counts(2, 3)
@pytest.mark.smoke
@pytest.mark.parametrize("method", ["ring", "ulysses", pytest.param("allgather", marks=nightly)])
def test_compiled_recomputed_and_under_autocast(method: str, ranks: int) -> None:
    on_ranks(ranks, in_a_step, method)


def tensor_parallel(
    name: str, layout: str, by: Sequence[Placement], sink_at: Sequence[Placement],
    gradient_at: Sequence[Placement], dtype: torch.dtype,
) -> None:  # fmt: skip
    """Query, key and value by heads or by batches, and a sink with placements of its own."""
    enable_dtensor()
    mesh = dtensor_cases.mesh_of(name)
    batch, heads, length = 4, 8, 9
    packed = layout == "TND"
    shape = (batch * length, heads, DIM) if packed else (batch, heads, length, DIM)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]
    whole.append(torch.linspace(-2, 2, heads).to(dtype))
    options: dict[str, Any] = {"num_heads": heads, "layout": layout, "sparse_mode": 3}
    if packed:
        ends = [length * (i + 1) for i in range(batch)]
        options |= {"actual_seq_lengths_query": ends, "actual_seq_lengths_key": ends}
    leaves = [x.clone().requires_grad_() for x in whole]
    with ops.limits(None):
        out, *_ = ops.flash_attention_score(*leaves[:3], sink=leaves[3], **options)
        d_out = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        out.backward(d_out)
        placed = [dtensor_cases.distribute(x, mesh, by).requires_grad_() for x in whole[:3]]
        sink = dtensor_cases.distribute(whole[3], mesh, sink_at).requires_grad_()
        actual, *_ = ops.flash_attention_score(*placed, sink=sink, **options)
        actual.backward(dtensor_cases.distribute(d_out, mesh, by))
    if mesh.get_coordinate() is None:
        return  # a rank outside of the mesh has nothing
    assert actual.placements == tuple(by)
    assert relative_error(actual.full_tensor(), out) <= 1e-14
    assert sink.grad.placements == tuple(gradient_at)
    for x, leaf in zip((*placed, sink), leaves, strict=True):
        assert isinstance(x.grad, DTensor)
        gradient = x.grad.full_tensor()
        assert gradient.dtype == leaf.dtype
        # Summands of a half precision sink are rounded before they are summed.
        close = 1e-13 if leaf.dtype == torch.float64 else 2**-7
        assert relative_error(gradient.double(), leaf.grad.double()) <= close


@takes_dtensors
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("mesh", "layout", "by", "sink_at", "gradient_at"),
    [
        ("4", "BNSD", [Shard(1)], [Shard(0)], [Shard(0)]),
        ("4", "TND", [Shard(1)], [Shard(0)], [Shard(0)]),
        ("4", "BNSD", [Shard(0)], [Replicate()], [Partial()]),
        ("2x2", "BNSD", [Shard(0), Shard(1)], [Replicate(), Shard(0)], [Partial(), Shard(0)]),
        ("4", "BNSD", [Shard(1)], [Replicate()], [Shard(0)]),
        ("3", "TND", [Shard(1)], [Shard(0)], [Shard(0)]),
    ],
    ids=["heads", "packed heads", "batches", "both", "a replicated sink", "three ranks"],
)
def test_tensor_parallelism(
    mesh: str, layout: str, by: list[Placement], sink_at: list[Placement],
    gradient_at: list[Placement], dtype: torch.dtype,
) -> None:  # fmt: skip
    on_ranks(
        4, dtensor_cases.without_group, tensor_parallel, mesh, layout, by, sink_at, gradient_at,
        dtype,
    )  # fmt: skip
