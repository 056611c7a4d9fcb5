"""A rank that dies in the middle of a step ends the others with an error, and soon."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops import distributed
from ascend_attn_ops.distributed import SequenceShards
from sparse_layer import Sizes, forward, inputs
from support.fresh import CONTEXT
from support.processes import free_port, join
from support.turns import nightly
from torch import Tensor

RANKS, KILLED, BACKEND_SECONDS = 3, 1, 20
SIZES = Sizes()


def train(rank: int, port: int, moment: str, pipe: Connection) -> None:
    join(rank, RANKS, port, BACKEND_SECONDS)

    def die_here(where: str) -> None:
        if rank == KILLED and where == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def attend(*tensors: Tensor, **options: Any) -> Any:
        die_here("forward")
        return distributed.sparse_flash_attention(*tensors, **options)

    functions = SimpleNamespace(**vars(distributed))
    functions.sparse_flash_attention = attend
    with ops.limits(None):
        shards = SequenceShards([30])
        tokens = inputs([30], torch.float32, SIZES)
        x = {name: shards.shard(value).requires_grad_() for name, value in tokens.items()}
        pipe.send("started")
        try:
            while True:
                found = forward(x, functions, SIZES, {"shards": shards})
                die_here("backward")
                found["out"].sum().backward()
        except RuntimeError as error:
            pipe.send(f"{type(error).__name__}: {error}")
    # After a failure, gloo's threads can abort a process that tears itself down.
    os._exit(0)


@pytest.mark.parametrize("moment", ["forward", pytest.param("backward", marks=nightly)])
def test_the_others_end(moment: str) -> None:
    port, ranks = free_port(), []
    for rank in range(RANKS):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=train, args=(rank, port, moment, theirs), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        for _, pipe in ranks:
            assert pipe.poll(120)
            assert pipe.recv() == "started"
        for rank, (process, pipe) in enumerate(ranks):
            process.join(120)
            assert process.exitcode == (-signal.SIGKILL if rank == KILLED else 0)
            if rank != KILLED:
                assert pipe.poll(0)
                assert pipe.recv().startswith(("RuntimeError: ", "DistBackendError: "))
    finally:
        for process, _ in ranks:
            process.kill()
