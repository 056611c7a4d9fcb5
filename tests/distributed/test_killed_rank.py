"""A rank that dies in the middle of a step ends the others with an error, and soon."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops import distributed
from ascend_attn_ops.distributed import SequenceShards
from sparse_layer import SCALE, Sizes, inputs
from support.fresh import CONTEXT
from support.processes import free_port, join
from support.turns import nightly

RANKS, KILLED, BACKEND_SECONDS = 3, 1, 20
SIZES = Sizes()


def train(rank: int, port: int, moment: str, pipe: Connection) -> None:
    join(rank, RANKS, port, BACKEND_SECONDS)

    def die_here(where: str) -> None:
        if rank == KILLED and where == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    with ops.limits(None):
        shards = SequenceShards([30])
        tokens = inputs([30], torch.float32, SIZES)
        x = {name: shards.shard(value).requires_grad_() for name, value in tokens.items()}
        pipe.send("started")
        try:
            while True:
                indices, _ = distributed.lightning_indexer(
                    x["query_index"], x["key_index"], x["weights"], shards=shards,
                    sparse_count=SIZES.count, prefetch=(x["latent"], x["key_rope"]),
                )  # fmt: skip
                die_here("forward")
                out, *_ = distributed.sparse_flash_attention(
                    x["query"], x["latent"], x["latent"], indices, scale_value=SCALE,
                    shards=shards, query_rope=x["query_rope"], key_rope=x["key_rope"],
                )  # fmt: skip
                die_here("backward")
                out.sum().backward()
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
                assert answer(pipe).startswith(("RuntimeError: ", "DistBackendError: "))
    finally:
        for process, _ in ranks:
            process.kill()


def answer(pipe: Connection) -> Any:
    assert pipe.poll(0)
    return pipe.recv()
