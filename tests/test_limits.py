"""Which device calls are checked for: by block, by process, by the environment."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import ascend_attn_ops
import pytest
from ascend_attn_ops.__main__ import main
from ascend_attn_ops._value_checks import VARIABLE
from ascend_attn_ops.device_limits import Device, device_in_force, parse, table
from support import fresh

NEWEST = "9.1"


def test_a_product_means_its_newest_cann() -> None:
    assert device_in_force() == ("A2", NEWEST)
    with ascend_attn_ops.limits("A3"):
        assert device_in_force() == ("A3", NEWEST)
        with ascend_attn_ops.limits("950", cann="9.0"):
            assert device_in_force() == ("950", "9.0")
        with ascend_attn_ops.limits(None):
            assert device_in_force() is None
        assert device_in_force() == ("A3", NEWEST)
    assert device_in_force() == ("A2", NEWEST)


@pytest.mark.parametrize(
    ("name", "product"),
    [("910B", "A2"), ("Ascend910B4-1", "A2"), ("910_93", "A3"), ("Ascend310P3", "310P")],
)
def test_a_soc_names_its_product(name: str, product: str) -> None:
    with ascend_attn_ops.limits(name):
        assert device_in_force() == (product, NEWEST)


@pytest.mark.parametrize("text", ["", "A3:9", "9.0"])
def test_wrong_texts(text: str) -> None:
    with pytest.raises(ValueError, match="expected None"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("A3:9.0", Device("A3", "9.0")),
        ("950", Device("950", NEWEST)),
        ("310P", Device("310P", NEWEST)),
        ("none", None),
        ("", Device("A2", NEWEST)),
    ],
)
def test_the_environment_sets_the_default(text: str, device: Device | None) -> None:
    code = "from ascend_attn_ops.device_limits import device_in_force as device; print(device())"
    result = fresh.run(code, ASCEND_ATTN_OPS_LIMITS=text)
    assert result.out.strip() == str(device), result.err


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("ASCEND_ATTN_OPS_LIMITS", "A3:1.0", ".* '8.5', '9.0', '9.1', got '1.0'"),
        *((VARIABLE, x, "expected 0 or 1$") for x in ("2", "yes")),
    ],
)
def test_a_wrong_environment_says_so(variable: str, text: str, expected: str) -> None:
    result = fresh.run("import ascend_attn_ops", **{variable: text})
    assert result.status != 0
    last = result.err.strip().splitlines()[-1]
    assert re.match(f"ValueError: {variable}={text}: {expected}", last), last


def test_a_device_has_one_limit_of_a_quantity() -> None:
    for row in table():
        for device, accepted in row["devices"].items():
            quantities = [name for name, _, _ in accepted["limits"]]
            assert len(set(quantities)) == len(quantities), (row["operator"], device)


def test_the_printed_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["limits", "A2:8.5"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Limits of Ascend A2 with CANN 8.5")
    for row in table():
        assert f"\n{row['operator']}\n" in printed


def test_printing_the_limits_of_an_unknown_device() -> None:
    result = fresh.python("-m", "ascend_attn_ops", "limits", "A9")
    assert result.status == 2
    assert "one of 'A2', 'A3', '950', '310P', got 'A9'" in result.err


@pytest.mark.parametrize("command", ["report", "limits", "mask"])
def test_every_command_has_its_help(command: str) -> None:
    result = fresh.python("-m", "ascend_attn_ops", command, "--help")
    assert result.status == 0, result.err
    assert result.out.startswith(f"usage: python -m ascend_attn_ops {command}")


def test_a_reader_that_leaves_early() -> None:
    """As `head` does, which takes one line of many."""
    # torch warns on the same stream where numpy is not installed.
    command = [sys.executable, "-W", "ignore", "-m", "ascend_attn_ops", "mask"]
    command += ["--mode=0", "--sq=999", "--skv=999"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        assert program.stdout.readline().startswith(b"sparse_mode 0")
        program.stdout.close()
        assert program.stderr.read() == b""
    assert program.returncode == -signal.SIGPIPE
