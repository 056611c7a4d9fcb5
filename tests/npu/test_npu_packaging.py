"""The wheels of ascend_attn_ops and of its simulator install all files, and work alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from support.checkout import ROOT
from support.simulated_npu import once
from support.turns import nightly

pytestmark = once

# Writes empty files in the place of objects and libraries: the wheel's list of files is the same.
COMPILER = """#!/bin/sh
previous=
for argument; do
  case "$previous" in -o|-MF) : > "$argument";; esac
  previous=$argument
done
"""


def run(*arguments: str, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the interpreter where nothing is simulated, with the packages that PYTHONPATH names."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not re.match("CANN_SIM|ASCEND_(HOME|OPP)|LD_LIBRARY_PATH|TORCH_DEVICE|TASK_", name)
    }
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env={**environment, **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def files_of_wheel(project: Path, folder: Path) -> set[str]:
    """Return the files of the wheel that is built where torch_npu is installed."""
    folder.mkdir()
    compiler = folder / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    built = run(
        "setup.py", "-q", "egg_info", f"--egg-base={folder}", "build", f"--build-base={folder}",
        "bdist_wheel", f"--bdist-dir={folder}/wheel", f"--dist-dir={folder}",
        folder=project, CXX=str(compiler), CC=str(compiler), PYTHONPATH="",
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


@nightly
def test_the_wheels_share_no_file(tmp_path: Path) -> None:
    """Uninstalling one leaves the other whole; only the simulator has libraries of CANN's names."""
    files = {}
    for name, project, packages in (
        ("ascend_attn_ops", ROOT, {"ascend_attn_ops", "ascend_attn_check"}),
        ("cann_simulator", ROOT / "simulation", {"cann_simulator"}),
    ):
        files[name] = files_of_wheel(project, tmp_path / name)
        assert {file.partition("/")[0].partition("-")[0] for file in files[name]} == packages
    ours, simulated = ({Path(x) for x in names if x.endswith(".so")} for names in files.values())
    assert {file.name.partition(".")[0] for file in ours} == {"_C", "_npu"}
    assert not [file for file in files["ascend_attn_ops"] if "simul" in file]
    assert {file.parent.as_posix() for file in simulated} == {"cann_simulator/cann/lib64"}
    assert Path("cann_simulator/cann/lib64/libascendcl.so") in simulated
    assert "cann_simulator/cann/opp/version.info" in files["cann_simulator"]


ALONE = """
    import cann_simulator

    cann_simulator.start()
    import torch, torch_npu

    x = torch.arange(6.0, dtype=torch.float16).view(2, 3)
    print(torch.equal((x.npu() @ x.npu().T).cpu(), x @ x.T))
    swished = torch_npu.npu_swiglu(torch.ones(2, 4).npu())
    print(swished.cpu().sum().item())
    q = torch.ones(1, 16, 1, 64, dtype=torch.float16).npu()
    try:
        torch_npu.npu_fusion_attention(q, q, q, 1, "BSND")
        torch.npu.synchronize()
    except RuntimeError as error:
        print(error)
    try:
        cann_simulator.environment(product="A3")
    except ValueError as error:
        print(error)
"""


def test_the_simulator_alone() -> None:
    ran = run("-c", re.sub("^    ", "", ALONE, flags=re.M), PYTHONPATH=str(ROOT / "simulation"))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("True\n"), ran.stderr
    lines = ran.stdout + ran.stderr
    assert "needs the operator ascend::flash_attention_score of ascend_attn_ops" in lines
    assert "because ascend_attn_ops, which knows the products, is not installed; got A3" in lines


def test_the_library_alone() -> None:
    ran = run("-m", "ascend_attn_ops", PYTHONPATH=str(ROOT / "python"))
    assert ran.returncode == 0, ran.stderr
    assert "torch_npu cannot be loaded: libascendcl.so" in ran.stdout
    assert "The CPU path works." in ran.stdout


@nightly
def test_another_version_of_the_library(tmp_path: Path) -> None:
    (tmp_path / "ascend_attn_ops.py").write_text('__version__ = "9.9"\n')
    path = os.pathsep.join([str(ROOT / "simulation"), str(tmp_path)])
    ran = run("-m", "cann_simulator", "-m", "this", PYTHONPATH=path)
    assert ran.returncode == 1
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("cann_simulator: cann_simulator 0.1.0 needs ascend_attn_ops 0.1.0, and")


@nightly
def test_children_that_do_not_import_the_library() -> None:
    """They call torch_npu's operators, which the simulator computes with those of the library."""
    child = (
        "import torch, torch_npu; q = torch.ones(1, 16, 1, 64, dtype=torch.float16).npu(); "
        "print(torch_npu.npu_fusion_attention(q, q, q, 1, 'BSND')[0].cpu().sum().item())"
    )
    code = f"""
import subprocess, sys
import cann_simulator
cann_simulator.start()
print(subprocess.check_output([sys.executable, "-c", {child!r}], text=True))
"""
    path = os.pathsep.join(str(ROOT / folder) for folder in ("python", "simulation"))
    ran = run("-c", code, PYTHONPATH=path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[0] == "1024.0"
