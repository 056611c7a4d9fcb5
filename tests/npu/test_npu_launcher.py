"""A call with arguments that the prototype does not have does not compile."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest
from cann_sim.build import include_flags
from conftest import TASK_QUEUE

pytestmark = pytest.mark.skipif(TASK_QUEUE != 1, reason="independent of the task queue: once")

ARGUMENTS = ["t", "t", "t", "none", "none", "none", "s", "s", "n", "n", "n", "n", "b", "t", "t"]


def compiles(arguments: list[str], folder: Path) -> bool:
    source = folder / "call.cpp"
    source.write_text(
        f"""
        #include "npu/aclnn/launcher.h"
        void call(const at::Tensor& t, std::optional<at::Tensor> none, std::string_view s,
                  int64_t n, bool b, double d, at::IntArrayRef list) {{
          using namespace ascend_attn::aclnn;
          launch<LightningIndexer>({", ".join(arguments)});
        }}
        """
    )
    flags = [*include_flags(), f"-I{sysconfig.get_paths()['include']}"]
    command = ["g++", "-std=c++20", "-fsyntax-only", *flags, str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        assert "launch" in result.stderr, result.stderr
    return result.returncode == 0


def test_the_prototypes_arguments(tmp_path: Path) -> None:
    assert compiles(ARGUMENTS, tmp_path)


@pytest.mark.parametrize(
    ("position", "argument"),
    [
        (0, "list"), (0, "n"), (3, "n"), (6, "n"), (6, "t"), (8, "b"), (8, "d"), (8, "int(1)"),
        (12, "n"), (12, "1"), (13, "s"),
    ],
)  # fmt: skip
def test_another_type(position: int, argument: str, tmp_path: Path) -> None:
    assert not compiles(ARGUMENTS[:position] + [argument] + ARGUMENTS[position + 1 :], tmp_path)


@pytest.mark.parametrize("arguments", [ARGUMENTS[:-1], [*ARGUMENTS, "t"], []], ids=len)
def test_another_number_of_arguments(arguments: list[str], tmp_path: Path) -> None:
    assert not compiles(arguments, tmp_path)
