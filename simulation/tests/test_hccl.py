"""Communication between simulated NPUs: several processes over the simulated HCCL."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from support.fresh import Ended
from support.simulated_npu import on_ranks, once


def run_ranks(*names: str, ranks: int = 2) -> list[Ended]:
    return on_ranks(ranks, f"import hccl_ranks\nhccl_ranks.main(*{names})")


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=once)])
def test_communication(ranks: int) -> None:
    for ended in run_ranks("reductions", "copies", "exchanges", "groups", "refusals", ranks=ranks):
        assert ended.status == 0, ended.err


@once
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a_rank_that_dies", "HcclAllReduce: rank 0: rank 1 has ended"),
        ("another_size", r"bytes in HcclAllReduce, where \d+ are expected in HcclAllReduce"),
    ],
)
def test_failures_end_all_ranks(what: str, message: str) -> None:
    ended = run_ranks(what)
    assert all(x.status != 0 and "no error" not in x.out for x in ended)
    assert any(re.search(message, x.err) for x in ended), ended


# Connects to every socket on which ranks listen, and keeps what it is sent, until it is killed.
STRANGER = """
import os, re, socket, struct, sys, time
user, message = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
os.setgid(user), os.setuid(user)
connections = {}
while True:
    listed = open("/proc/net/unix").read()
    for name in re.findall(r" 00010000 .* @(ascend_attn_ops.simulate/.*)", listed):
        if name not in connections:
            connections[name] = socket.socket(socket.AF_UNIX)
            try:
                connections[name].connect("\\0" + name)
                print("connected", flush=True)
                connections[name].send(message)  # fails where the rank has closed already
                connections[name].setblocking(False)
            except OSError:
                pass
    for connection in connections.values():
        try:
            if connection.recv(32):
                print("received", flush=True)
        except OSError:
            pass
    time.sleep(.002)
"""
NOBODY = 65534
RANK_1 = (1).to_bytes(4, "little")


@once
@pytest.mark.parametrize(
    ("user", "message"),
    [
        pytest.param(
            NOBODY, RANK_1, id="another user in the place of rank 1",
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user"),
        ),
        pytest.param(os.getuid(), b"", id="one that says nothing"),
    ],
)  # fmt: skip
def test_strangers_get_and_delay_nothing(user: int, message: bytes) -> None:
    command = [sys.executable, "-c", STRANGER, str(user), message.hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
        ended = run_ranks("a_late_rank")
        stranger.kill()
        assert stranger.stdout is not None
        printed = stranger.stdout.read()
    assert all(x.status == 0 for x in ended), ended
    assert "connected" in printed
    assert "received" not in printed
