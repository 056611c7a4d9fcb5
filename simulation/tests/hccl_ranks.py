"""The ranks of test_hccl.py: communication over HCCL, and its expected results."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from torch import Tensor
from torch.distributed import ReduceOp

DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip


def of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns data of a rank: small integers, whose sums and products are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def check(actual: Tensor, expected: Tensor) -> None:
    assert actual.device.type == "npu"
    assert torch.equal(actual.cpu(), expected), (actual, expected)


def reductions(rank: int, ranks: int) -> None:
    reduced: dict[ReduceOp.RedOpType, Callable[[Tensor], Tensor]] = {
        ReduceOp.SUM: lambda x: x.sum(0), ReduceOp.PRODUCT: lambda x: x.prod(0),
        ReduceOp.MAX: lambda x: x.amax(0), ReduceOp.MIN: lambda x: x.amin(0),
    }  # fmt: skip
    for dtype in DTYPES:
        for op, function in reduced.items():
            for size in (0, 1, 7, 4096):
                every = torch.stack([of(i, size, dtype=dtype) for i in range(ranks)])
                expected = function(every).to(dtype)
                x = every[rank].npu()
                dist.all_reduce(x, op)
                check(x, expected)
        every = torch.stack([of(i, ranks, 5, dtype=dtype) for i in range(ranks)])
        part = torch.empty(5, dtype=dtype).npu()
        dist.reduce_scatter_tensor(part, every[rank].npu())
        check(part, every.sum(0)[rank].to(dtype))
        x = every[rank].npu()
        dist.reduce(x, ranks - 1)
        if rank == ranks - 1:
            check(x, every.sum(0).to(dtype))


def copies(rank: int, ranks: int) -> None:
    for dtype in (*DTYPES, torch.bool, torch.uint8):
        every = torch.stack([of(i, 2, 3, dtype=dtype) for i in range(ranks)])
        gathered = torch.empty(ranks * 2, 3, dtype=dtype).npu()
        dist.all_gather_into_tensor(gathered, every[rank].npu())
        check(gathered, every.flatten(0, 1))
        x = every[rank].npu()
        dist.broadcast(x, ranks - 1)
        check(x, every[ranks - 1])
    rows = [of(i, i + 1, 2) for i in range(ranks)]  # as many as the rank has
    uneven = [torch.empty_like(x).npu() for x in rows]
    dist.all_gather(uneven, rows[rank].npu())
    for x, expected in zip(uneven, rows, strict=True):
        check(x, expected)
    got = torch.empty(4).npu()
    dist.scatter(got, [of(i, 4).npu() for i in range(ranks)] if rank == 0 else None)
    check(got, of(rank, 4))


def exchanges(rank: int, ranks: int) -> None:
    every = torch.stack([of(i, ranks, 3) for i in range(ranks)])
    got = torch.empty(ranks, 3).npu()
    dist.all_to_all_single(got, every[rank].npu())
    check(got, every[:, rank])
    # Rank i sends i + j rows to rank j.
    sent = [of(10 * rank + other, rank + other, 2) for other in range(ranks)]
    sizes = [rank + other for other in range(ranks)]
    rows = torch.empty(sum(sizes), 2).npu()
    dist.all_to_all_single(rows, torch.cat(sent).npu(), sizes, sizes)
    check(rows, torch.cat([of(10 * other + rank, rank + other, 2) for other in range(ranks)]))
    # Large messages to the next rank, all at once.
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    received = torch.empty(1 << 20).npu()
    messages = [
        dist.P2POp(dist.irecv, received, before),
        dist.P2POp(dist.isend, of(rank, 1 << 20).npu(), after),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    check(received, of(before, 1 << 20))
    if rank == 0:
        dist.send(of(0, 5).npu(), 1)
    elif rank == 1:
        x = torch.empty(5).npu()
        dist.recv(x, 0)
        check(x, of(0, 5))
    objects = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": i} for i in range(ranks)]
    dist.barrier()


def groups(rank: int, ranks: int) -> None:
    for group_ranks in ([0, ranks - 1], list(range(1, ranks))):
        group = dist.new_group(group_ranks)
        if rank in group_ranks:
            x = of(rank, 6).npu()
            dist.all_reduce(x, group=group)
            check(x, torch.stack([of(i, 6) for i in group_ranks]).sum(0))


def refusals(rank: int, ranks: int) -> None:
    with pytest.raises(RuntimeError, match="kDouble"):
        dist.all_reduce(torch.ones(3, dtype=torch.float64).npu())


def a_rank_that_dies(rank: int, ranks: int) -> None:
    x = torch.ones(3).npu()
    dist.all_reduce(x)
    torch.npu.synchronize()
    if rank == 1:
        os._exit(7)
    dist.all_reduce(x)
    torch.npu.synchronize()
    print("no error", flush=True)


def a_late_rank(rank: int, ranks: int) -> None:
    """The others listen for it meanwhile, and a stranger may come."""
    time.sleep(3 * rank)
    x = torch.full((4,), rank + 1.0).npu()
    dist.all_reduce(x)
    check(x, torch.full((4,), 3.0))


def another_size(rank: int, ranks: int) -> None:
    dist.all_reduce(torch.ones(3 + rank).npu())
    torch.npu.synchronize()
    print("no error", flush=True)


def main(*names: str) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.npu.set_device(rank)
    dist.init_process_group("hccl")
    for name in names:
        globals()[name](rank, ranks)
        dist.barrier()  # rank 0 holds the store in which the others look for their groups
    dist.destroy_process_group()
