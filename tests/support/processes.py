"""Runs functions on several ranks: gloo, one process per rank, and a time-out for everything.

The processes are forked once from a server that has torch imported, and wait for work. A group of
fewer ranks leaves the last processes idle.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.fresh import CONTEXT
from support.turns import nightly

WORLD_SIZE = 4
# A collective has less time than a call, so that a hang says where it is.
COLLECTIVE_SECONDS = 60
CALL_SECONDS = 150
START_SECONDS = 120


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def join(rank: int, world_size: int, port: int, seconds: float = COLLECTIVE_SECONDS) -> None:
    """Make this process a rank."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group(
        "gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=seconds)
    )


def _serve(rank: int, port: int, pipe: Connection) -> None:
    faulthandler.enable()  # a crash says where it was
    join(rank, WORLD_SIZE, port)
    groups = {size: dist.new_group(list(range(size))) for size in range(1, WORLD_SIZE)}
    groups[WORLD_SIZE] = dist.group.WORLD
    pipe.send(("ready", None))
    while True:
        try:
            size, function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("result", function(groups[size], *args)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))


class _Pool:
    def __init__(self) -> None:
        port = free_port()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(WORLD_SIZE):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(rank, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.collect(WORLD_SIZE, START_SECONDS)

    def collect(self, size: int, seconds: float) -> list[Any]:
        answers: dict[int, Any] = {}
        waiting = {self.pipes[rank]: rank for rank in range(size)}
        failures = []
        while waiting:
            ready = wait(list(waiting), timeout=seconds)
            if not ready:
                failures.append(f"ranks {sorted(waiting.values())}: no answer in {seconds} s")
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    kind, answers[rank] = pipe.recv()
                except EOFError:
                    kind, answers[rank] = "error", "the process ended"
                if kind == "error":
                    failures.append(f"rank {rank}: {answers[rank]}")
                    # The others may wait for this rank in vain.
                    seconds = min(seconds, 5)
        if failures:
            self.kill()
            raise AssertionError("\n".join(failures))
        return [answers[rank] for rank in range(size)]

    def kill(self) -> None:
        global _pool
        for process in self.processes:
            process.kill()
            process.join()
        _pool = None


_pool: _Pool | None = None


def end() -> None:
    """End the processes; the next call starts new ones."""
    if _pool is not None:
        _pool.kill()


atexit.register(end)


def on_ranks(
    size: int, function: Callable[..., Any], *args: Any, seconds: float = CALL_SECONDS
) -> list[Any]:
    """Call function(group, *args) on `size` ranks, and return what it returns on each.

    The function is one of a module, and what goes in and out is plain data. A failure on any rank
    is a failure here, and so are `seconds` of silence.
    """
    global _pool
    pytest.importorskip("numpy", reason="numpy is not installed: torch sends objects through it")
    if _pool is None:
        _pool = _Pool()
    pool = _pool
    for pipe in pool.pipes[:size]:
        pipe.send((size, function, args))
    return pool.collect(size, seconds)


def rank_counts(*counts: int) -> pytest.MarkDecorator:
    """Runs a test with each number of ranks; the commit tier takes the first alone."""
    first, *others = counts
    values = [first, *(pytest.param(x, marks=nightly) for x in others)]
    return pytest.mark.parametrize("ranks", values)


def _average(group: dist.ProcessGroup) -> float:
    mine = torch.zeros(1)
    everybodys = torch.ones(group.size())
    dist.reduce_scatter_tensor(mine, everybodys, op=dist.ReduceOp.AVG, group=group)
    return mine.item()


def skip_unless_gloo_averages() -> None:
    """Skip a test of FSDP2, which asks for averages of float32 gradients."""
    if on_ranks(2, _average) != [1, 1]:
        pytest.skip(f"gloo of torch {torch.__version__} gives a sum for the average of FSDP2")
