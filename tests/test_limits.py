"""Which device calls are checked for: by block, by process, by the environment."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import ascend_attn_ops
import pytest
import torch
from ascend_attn_ops.__main__ import main
from ascend_attn_ops._core.device_limits import Device, device_in_force, parse, table
from ascend_attn_ops._core.value_checks import VARIABLE
from support import fresh
from torch import Tensor

NEWEST = "9.1"


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
        ("A3:9.0", Device("A3", "9.0")), ("950", Device("950", NEWEST)),
        ("310P", Device("310P", NEWEST)), ("none", None), ("", Device("A2", NEWEST)),
    ],
)  # fmt: skip
def test_the_environment_sets_the_default(text: str, device: Device | None) -> None:
    code = (
        "from ascend_attn_ops._core.device_limits import device_in_force as device; print(device())"
    )
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
        said = program.stderr.read().splitlines()
        assert [line for line in said if b"triton not found" not in line] == []  # torch 2.14's
    assert program.returncode == -signal.SIGPIPE


# limits() belongs to a thread, and a gradient is checked against the limits of its forward.

DEFAULT = Device("A2", "9.1")


def in_a_thread(function: Callable[[], object]) -> list[object]:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results


def attention() -> tuple[Tensor, Tensor]:
    """Sizes that no device accepts: the query, and its output."""
    query = torch.randn(1, 3, 3, 8, requires_grad=True)
    key = torch.randn(1, 3, 1, 8)
    indices = torch.arange(3, dtype=torch.int32).expand(1, 3, 1, 3)
    out, *_ = torch.ops.ascend.sparse_flash_attention(query, key, key, indices, scale_value=0.3)
    return query, out


def block(product: Any) -> Iterator[Device | None]:
    """A generator whose limits are in force while it is suspended."""
    with ascend_attn_ops.limits(product):
        while True:
            yield device_in_force()


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_blocks_end_in_any_order(order: tuple[int, ...]) -> None:
    devices = [None, Device("A3", "9.1"), Device("950", "9.1")]
    blocks = [block(device and device.product) for device in devices]
    assert [next(b) for b in blocks] == devices
    remaining = [0, 1, 2]
    for i in order:
        blocks[i].close()  # type: ignore[attr-defined]
        remaining.remove(i)
        assert device_in_force() == (devices[remaining[-1]] if remaining else DEFAULT)


def test_a_block_can_end_in_another_thread() -> None:
    generator = block(None)
    assert next(generator) is None
    in_a_thread(generator.close)  # type: ignore[attr-defined]
    assert device_in_force() == DEFAULT


def test_a_block_is_that_of_its_thread() -> None:
    lifted = ascend_attn_ops.limits(None)

    def enter_and_leave() -> tuple[Device | None, Device | None]:
        with lifted:
            inside = device_in_force()
        return inside, device_in_force()

    with lifted:
        assert in_a_thread(device_in_force) == [DEFAULT]
        assert in_a_thread(enter_and_leave) == [(None, DEFAULT)]
        assert device_in_force() is None
    assert device_in_force() == DEFAULT


def test_a_decorated_function() -> None:
    @ascend_attn_ops.limits(None)
    def device(depth: int) -> Device | None:
        return device(depth - 1) if depth else device_in_force()

    assert device(2) is None
    assert device_in_force() == DEFAULT


@pytest.fixture
def restored_default() -> Iterator[None]:
    yield
    ascend_attn_ops.set_limits(DEFAULT.product, DEFAULT.cann)  # type: ignore[arg-type]


@pytest.mark.usefixtures("restored_default")
def test_set_limits_is_the_default_of_the_process() -> None:
    ascend_attn_ops.set_limits(None)
    query, out = attention()
    assert in_a_thread(device_in_force) == [None]
    with ascend_attn_ops.limits("A3:8.5"):
        ascend_attn_ops.set_limits("950", "9.0")
        assert device_in_force() == ("A3", "8.5")
    assert device_in_force() == ("950", "9.0")
    out.sum().backward()  # with the limits of its forward
    assert query.grad is not None


@pytest.mark.parametrize("function", [ascend_attn_ops.set_limits, ascend_attn_ops.limits])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("A5",), ValueError, "product: expected None or one of 'A2', 'A3', '950', '310P', got 'A"),
        (("A2", "9.2"), ValueError, "cann: expected None for the newest or .* '9.1', got '9.2'"),
        ((2,), TypeError, "product: expected"),
    ],
)
def test_unknown_names(function: Any, arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"limits: {message}"), function(*arguments) or nullcontext():
        pass
    assert device_in_force() == DEFAULT


@pytest.mark.parametrize("elsewhere", ["here", "in a thread", "in another block"])
def test_a_gradient_has_the_limits_of_its_forward(elsewhere: str) -> None:
    with ascend_attn_ops.limits(None):
        query, out = attention()
    with ascend_attn_ops.limits("A3") if elsewhere == "in another block" else nullcontext():
        if elsewhere == "in a thread":
            in_a_thread(lambda: out.sum().backward())
        else:
            out.sum().backward()
    assert query.grad is not None


def test_a_gradient_is_not_checked_less_than_its_forward() -> None:
    seen = []
    query = torch.randn(1, 1, 1, 512, dtype=torch.bfloat16, requires_grad=True)
    key = torch.randn(1, 1, 1, 512, dtype=torch.bfloat16)
    rope = torch.randn(1, 1, 1, 64, dtype=torch.bfloat16)
    indices = torch.zeros(1, 1, 1, 1, dtype=torch.int32)

    def unpacked(x: Tensor) -> Tensor:
        seen.append(device_in_force())
        with ascend_attn_ops.limits("A3"):
            seen.append(device_in_force())
        return x

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpacked):
        out, *_ = torch.ops.ascend.sparse_flash_attention(
            query, key, key, indices, scale_value=0.04, query_rope=rope, key_rope=rope
        )
    with ascend_attn_ops.limits(None):
        out.sum().backward()
    assert set(seen) == {DEFAULT, ("A3", "9.1")}


def test_the_inner_block_holds_in_a_gradient() -> None:
    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, d: Tensor) -> Tensor:  # type: ignore[override]
            with ascend_attn_ops.limits(None):
                attention()
            return d

    x = torch.ones(1, requires_grad=True)
    Recompute.apply(x).backward()
    assert device_in_force() == DEFAULT


def test_blocks_in_a_gradient_end_in_any_order() -> None:
    seen = []
    suspended: list[Any] = []

    def unpacked(x: Tensor) -> Tensor:
        if seen:
            return x
        # The backward of attention, with the limits of its forward in force.
        first, second = block("A3"), block("950")
        seen.extend([device_in_force(), next(first), next(second)])
        first.close()  # type: ignore[attr-defined]
        seen.append(device_in_force())
        second.close()  # type: ignore[attr-defined]
        seen.append(device_in_force())
        suspended.append(block(None))
        seen.append(next(suspended[-1]))
        return x

    with (
        ascend_attn_ops.limits(None),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpacked),
    ):
        _, out = attention()
    out.sum().backward()
    products = [device and device.product for device in seen]
    assert products == [None, "A3", "950", "950", None, None]
    # The last block has outlived the backward pass.
    assert device_in_force() is None
    suspended[-1].close()
    assert device_in_force() == DEFAULT
