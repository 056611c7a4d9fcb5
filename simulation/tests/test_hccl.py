"""Communication between simulated NPUs: several processes over the simulated HCCL."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import cann_simulator
import pytest
import torch
from conftest import DEVICE, TASK_QUEUE, once
from test_npu_example import EXAMPLES, OPTIONS

pytestmark = pytest.mark.skipif(
    DEVICE != ("A2", "9.1"), reason="independent of the device: on the first"
)


# Without torch_npu, whose device torch would take for that of a mesh.
NO_NPU = {"LD_LIBRARY_PATH": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def run_ranks(
    ranks: int, script: Path, *arguments: str, on: str = "npu"
) -> subprocess.CompletedProcess[str]:
    simulated = cann_simulator.environment(devices=ranks, task_queue=TASK_QUEUE)
    environment = {
        **os.environ, **(simulated if on == "npu" else NO_NPU), "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # a rank that crashes says where
    }  # fmt: skip
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={ranks}", str(script), *arguments,
    ]  # fmt: skip
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


RANKS = Path(__file__).with_name("hccl_ranks.py")


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=once)])
def test_communication(ranks: int) -> None:
    result = run_ranks(ranks, RANKS, "reductions", "copies", "exchanges", "groups", "refusals")
    assert result.returncode == 0, result.stderr


@once
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a_rank_that_dies", "HcclAllReduce: rank 0: rank 1 has ended"),
        ("another_size", r"bytes in HcclAllReduce, where \d+ are expected in HcclAllReduce"),
    ],
)
def test_failures_end_all_ranks(what: str, message: str) -> None:
    result = run_ranks(2, RANKS, what)
    assert result.returncode != 0
    assert "no error" not in result.stdout
    assert re.search(message, result.stderr), result.stderr


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
def test_strangers_get_and_delay_nothing(
    user: int, message: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "60")
    command = [sys.executable, "-c", STRANGER, str(user), message.hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
        result = run_ranks(2, RANKS, "a_late_rank")
        stranger.kill()
        assert stranger.stdout is not None
        printed = stranger.stdout.read()
    assert result.returncode == 0, result.stderr
    assert "connected" in printed
    assert "received" not in printed


@once
@pytest.mark.skipif(
    torch.__version__ < (2, 9),
    reason=f"gloo of torch {torch.__version__} gives a sum for the average of FSDP2",
)
def test_the_distributed_example_does_what_it_does_with_gloo(tmp_path: Path) -> None:
    histories = {}
    for device in ("cpu", "npu"):
        options = {**OPTIONS, "device": device, "out": tmp_path / device, "context-parallel": 2}
        arguments = [f"--{name}={value}" for name, value in options.items()]
        result = run_ranks(2, EXAMPLES / "train_lightning_indexer.py", *arguments, on=device)
        assert result.returncode == 0, result.stderr
        histories[device] = json.loads((tmp_path / device / "metrics.json").read_text())["history"]
    assert histories["npu"] == histories["cpu"]
