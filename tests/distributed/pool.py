"""Processes that run functions together, as the ranks of a gloo group.

Starting them takes seconds, so that one pool runs many cases. A case that takes too long has hung:
the processes are ended, and the next case starts new ones.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

SECONDS = 120.0
_SECONDS_TO_START = 300.0


class Pool:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = SECONDS) -> list[Any]:
        """Call a function of a module on all ranks, and return what each returned.

        Raises AssertionError with the traceback of the first rank that raised, or where one hung.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, args))
        deadline = time.monotonic() + seconds
        answers: dict[int, tuple[str, Any]] = {}
        silent: list[str] = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(max(deadline - time.monotonic(), 0)):
                silent.append(f"rank {rank} hung: no answer within {seconds:g} s")
                continue
            try:
                answers[rank] = connection.recv()
            except EOFError:
                silent.append(f"rank {rank} died")
        if silent:
            self.close()
        failed = [f"rank {rank}\n{text}" for rank, (text, _) in answers.items() if text]
        assert not silent + failed, "\n".join(silent + failed)
        return [result for _, result in answers.values()]

    def close(self) -> None:
        if not self._processes:
            return
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.ranks):
            here, there = context.Pipe()
            arguments = (rank, self.ranks, f"file://{self._folder.name}/store", there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)
        for connection in self._connections:
            # Importing torch takes a busy machine long, which is no hang.
            assert connection.poll(_SECONDS_TO_START), "the processes did not start"
            connection.recv()


def _serve(rank: int, ranks: int, store: str, connection: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timeout)
    connection.send("ready")
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(0.5 * SECONDS)  # says where a rank hangs
        try:
            connection.send(("", function(*args)))
        except BaseException:
            connection.send((traceback.format_exc(), None))
        faulthandler.cancel_dump_traceback_later()
