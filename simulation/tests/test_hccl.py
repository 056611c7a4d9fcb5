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
import os, re, socket, sys, time
from contextlib import suppress
user, claim = int(sys.argv[1]), sys.argv[2]
os.setgid(user), os.setuid(user)
connections = {}
while True:
    listed = open("/proc/net/unix").read()
    for name in re.findall(r" 00010000 .* @(ascend_attn_ops.simulate/.*)", listed):
        if name not in connections:
            connections[name] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with suppress(OSError):
                if claim:
                    connections[name].bind("\\0" + name[:-1] + claim)
                connections[name].connect("\\0" + name)
                print("connected", flush=True)
                connections[name].setblocking(False)
    for connection in connections.values():
        with suppress(OSError):
            if connection.recv(32):
                print("received", flush=True)
    time.sleep(.002)
"""
AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
ANOTHER_USER = pytest.param(65534, "1>0/", marks=AS_ROOT, id="another user in place of rank 1")


@once
@pytest.mark.parametrize(("user", "claim"), [ANOTHER_USER, (os.getuid(), "")])
def test_strangers_get_and_delay_nothing(user: int, claim: str) -> None:
    command = [sys.executable, "-c", STRANGER, str(user), claim]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
        ended = run_ranks("a_late_rank")
        stranger.kill()
        assert stranger.stdout is not None
        printed = stranger.stdout.read()
    assert all(x.status == 0 for x in ended), ended
    assert "connected" in printed
    assert "received" not in printed
